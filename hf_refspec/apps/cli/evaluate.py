"""`hf-refspec store evaluate`: measures whether a datastore pays off for a model."""

from argparse import ArgumentParser, Namespace
from datetime import date
from itertools import islice
from pathlib import Path

from ...corpus.documents import open_source
from ...drafting.contract import Drafter
from ...drafting.copied_spans import copied_spans
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.reference_copy import ReferenceCopy
from ...messages import counted
from ...store.datastore import Datastore
from ...store.datastore_config import COLUMNS
from ...store.files import CONFIG, DatastoreError
from ...version import __version__
from ..bench import measure
from ..bench.measure import Chat, read_chats, rendered
from ..shared.comparison import FEWEST_PROMPTS, UNDRAFTED, Comparison
from ..shared.loading import check_sources, load_tokenizer, name_for_people
from ..shared.streams import Terminal
from .arguments import add_model, positive
from .bench import REPLAYED, Drafted, compared

_PROMPT_TOKENS = 64  # the beginning of a text that is a prompt
_SHORTEST_PROMPT = 8  # tokens
_TEXTS = 10_000  # prompts are chosen from the first of a corpus
_DEFAULT = "default drafter"
_WITH_STORE = "with the datastore"


def add_evaluate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="a folder or a Hub id")
    help = "files and folders of texts that are not in the datastore; the model continues their "
    add("texts", nargs="*", type=Path, help=f"{help}first {_PROMPT_TOKENS} tokens")
    add("--prompts", type=Path, metavar="FILE", help="prompts instead, as for hf-refspec bench")
    add("--column", help="the column with texts or chats, in files of rows")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add_model(parser)
    add("--limit", type=positive, default=12, metavar="N", help="at most N prompts")
    add("--max-new-tokens", type=positive, default=96, metavar="N", help="of each answer")


def evaluate(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    if bool(args.texts) == (args.prompts is not None):
        raise ValueError("give one of: texts that are not in the datastore, --prompts FILE")
    tokenizer = load_tokenizer(args.model)
    store = Datastore.from_pretrained(args.store, tokenizer=tokenizer)
    check_sources([DatastoreDrafts(store)], args.model)
    if args.prompts is not None:
        chats = rendered(read_chats(args.prompts, turns=1), tokenizer, args.limit)
    else:
        opened = open_source(args.texts, tokenizer, args.column, args.pattern)
        first = islice(opened.documents, _TEXTS)
        texts = [text[: 1 << 12] for text in first if isinstance(text, str)]
        chosen = texts[:: max(len(texts) // args.limit, 1)][: args.limit]
        tokenized = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in chosen]
        prompts = [ids[:_PROMPT_TOKENS] for ids in tokenized if len(ids) >= _SHORTEST_PROMPT]
        chats = [Chat([tokenizer.decode(ids)], [], is_text=True) for ids in prompts]
        if not chats:
            why = f"no text has the {_SHORTEST_PROMPT} tokens that a prompt needs"
            raise ValueError(f"{why}; give others")
    asked = counted(len(chats), "prompt")
    about = f"loading {args.model or 'the default model'} to answer {asked} plainly, "
    about += f"with the default drafter, and with the {store.form} form of {args.store}"
    print(about, flush=True)
    auto = measure.BY_NAME["auto"]
    drafted: Drafted = {
        _DEFAULT: (lambda _: auto(), "auto"),
        _WITH_STORE: (lambda _: auto() | DatastoreDrafts(store), "auto"),
    }
    comparison = compared(args, tokenizer, chats, drafted)
    status = comparison.report(Terminal(), {_WITH_STORE: _DEFAULT})
    held = 0  # prompts that the datastore has in full
    for prompt in comparison.prompts:
        ids = [token for token in prompt if token not in tokenizer.all_special_ids]
        spans = copied_spans(0, ids, [(args.store, store.shards)])
        held += [(span.start, span.end) for span in spans] == [(0, len(ids))]
    if held:
        among = f"{held} of {counted(len(comparison.prompts), 'prompt')}"
        print(f"the datastore itself holds {among}: it gains less on other texts")
    _record(args, store, comparison, held)
    return status


def _record(args: Namespace, store: Datastore, comparison: Comparison, held: int) -> None:
    """Writes look-up's MAT over plain decoding's answers into a datastore."""
    ids = [call.ids for call in comparison.calls[UNDRAFTED]]
    answers = list(zip(comparison.prompts, ids, strict=True))
    nodes = REPLAYED[-1]

    def mat(drafter: Drafter) -> float:
        return round(measure.replay(answers, drafter, store.config.vocab_size, nodes).mat, 2)

    without = mat(ReferenceCopy())
    with_store = mat(ReferenceCopy() | DatastoreDrafts(store))
    mats = f"MAT {with_store}, without the datastore {without}"
    print(f"by look-up alone, {nodes} draft tokens: {mats}")
    names = ", ".join(path.resolve().name for path in args.texts or [args.prompts])
    among = f" ({held} in it)" if held else ""
    prompts = f"{len(answers)} of {names:.99}{among}; {counted(args.max_new_tokens, 'new token')}"
    dtype = str(comparison.model.dtype).removeprefix("torch.")
    model = f"{name_for_people(args.model)}, {dtype}"
    measured = f"{date.today()}, hf_refspec {__version__}"
    gain = comparison.gain(_WITH_STORE, _DEFAULT)
    speed_up = gain.spread if gain.drafts_help else "none, MAT 1.00"
    if gain.prompts < FEWEST_PROMPTS:
        speed_up = "not enough to say"
    figures = store.form, prompts, model, nodes, without, with_store, speed_up, measured
    try:
        store.record(dict(zip(COLUMNS, figures, strict=True)))
        print(f"written into {store.path / CONFIG}, for the card")
    except (DatastoreError, OSError) as error:
        print(f"not written: {error}")
