"""Private and changing names of transformers stand in one file."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

import hf_refspec

ROOT = Path(hf_refspec.__file__).parent
NAMES = ROOT / "transformers_names.py"
# The one other file that knows versions.
VERSION = ROOT / "version.py"
OTHERS = sorted({*ROOT.rglob("*.py")} - {NAMES, VERSION})
# Private names of Python, numpy and torch.
FOREIGN = {
    *("_replace", "_version", "_buffers", "_parameters", "_modules", "_dynamo", "_asdict"),
    *("_check_value", "_option_string_actions", "_subparsers"),
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
    *("_torchdynamo_orig_callable", "_current_level", "_profiler_enabled", "_compiled_call_impl"),
    "_linear_pointwise",
}
KINDS = (PreTrainedModel, GenerationMixin, PreTrainedConfig, GenerationConfig, Cache)
CACHE_NAMES = {"past_key_values", "cache_params"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def own_private_names() -> set[str]:
    """All that the package defines: functions, classes, variables, attributes and arguments."""
    names = set()
    for path in OTHERS:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if name.startswith("_")}


def of_transformers(path: Path) -> set[str]:
    """What only one file may know of transformers: private names, modules below those that are
    documented as places to import from, names of cache arguments, and versions."""
    asked, found = set(), set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if not re.fullmatch(r"self|cls|super\(\)", ast.unparse(node.value)):
                asked.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            asked |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            found |= {node.module} - {"transformers.generation", "transformers.utils"}
        elif isinstance(node, (ast.Constant, ast.keyword)):
            found |= {getattr(node, "arg", None) or getattr(node, "value", None)} & CACHE_NAMES
    # Those that transformers' classes have, or that nothing in the package defines.
    private = {name for name in asked if re.match(r"_(?!_)", name)}
    theirs = {name for kind in KINDS for name in dir(kind)} & private
    found |= (theirs | private - own_private_names()) - FOREIGN
    source = io.StringIO(path.read_text(encoding="utf-8"))
    tokens = tokenize.generate_tokens(source.readline)
    words = {each.string for each in tokens if each.type in (tokenize.COMMENT, tokenize.STRING)}
    return found | {each for each in words if re.search(r"transformers[ =<>]*\d|\(5\.\d+\)", each)}


def test_no_other_file_knows_of_what_changes():
    found = {path.name: names for path in OTHERS if (names := of_transformers(path))}
    # A function of its slow tokenizers, the same since its first versions.
    assert found == {"streams.py": {"transformers.convert_slow_tokenizer"}}


def test_the_walk_finds_what_it_looks_for():
    found = of_transformers(NAMES)
    assert {"_sample", "_prefill", "_eos_token_tensor", "_attn_implementation"} <= found
    assert {"transformers.generation.utils", "past_key_values"} <= found
