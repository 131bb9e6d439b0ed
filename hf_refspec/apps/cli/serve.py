"""`hf-refspec serve`: the OpenAI-compatible server."""

import logging
import os
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from functools import partial
from ipaddress import ip_address

from ...drafting.datastore_drafts import DatastoreDrafts
from ...kernels.compilation import drafting_kernels
from ...messages import require
from ..shared.loading import load_model, load_tokenizer, name_for_people
from .arguments import (
    add_assistants,
    add_listening,
    add_model,
    add_sources,
    listen,
    log_to_stderr,
    positive,
    sources,
)

logger = logging.getLogger("hf_refspec")

_PASS_SECONDS = 5  # a second ctrl-C waits this long for the running forward pass
_KEY = "HF_REFSPEC_API_KEY"


def add_serve(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add_listening(parser, 8000, "; 0 for a free one")
    names = "names by which clients may call the model; answers use the first (its own name)"
    add("--served-model-name", nargs="+", metavar="NAME", help=names)
    keys = f"clients must send one of these keys; or set {_KEY}, which no list of processes shows"
    add("--api-key", nargs="+", metavar="KEY", help=keys)
    pages = "web pages that may ask, such as https://chat.example, or * for all; by default none"
    add("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help=pages)
    texts = parser.add_argument_group("texts")
    add_sources(texts)
    add_assistants(parser)
    isolated = "learn nothing from one request for the next: slower, but reveals no client's texts"
    add("--isolate", action="store_true", help=isolated)
    limit = partial(parser.add_argument_group("limits").add_argument, type=positive, metavar="N")
    rows = "requests decoded together (by default as many as half of the free memory holds with "
    rows += "4,096 tokens each, up to 16 on a CPU and 64 elsewhere)"
    limit("--max-rows", help=rows)
    limit("--max-new-tokens", default=2048, help="of an answer, and where a request names none")
    limit("--max-seconds", default=600, help="that one request is decoded")
    limit("--max-body-bytes", default=4 << 20, help="of a request")
    limit("--max-waiting", default=64, help="requests that wait")


def serve(args: Namespace) -> int:
    """Serves until ctrl-C."""
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        require(library, "hf-refspec serve", "serve")
    from ..serve.engine import RequestEngine
    from ..serve.routes import Server, make_app, url
    from ..serve.served_model import ServedModel

    if args.isolate and args.cache is not None:
        raise ValueError("--cache keeps texts for later requests; leave out --isolate")
    environment = [os.environ[_KEY]] if _KEY in os.environ else []
    keys = [key.strip() for key in args.api_key or environment]
    if "" in keys:
        raise ValueError(f"a key of --api-key or {_KEY} is empty; give one, or leave it out")
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    with listen(args.host, args.port) as listening:
        tokenizer = load_tokenizer(args.model)
        new_drafters = sources(args, tokenizer)
        drafting_kernels.ready()  # or they are compiled while the model is loaded
        model = load_model(args.model, args.device_map, args.dtype)
        drafters = new_drafters(model)
        opened = [drafter.store for drafter in drafters if isinstance(drafter, DatastoreDrafts)]
        source_names = {str(store.path): name_for_people(args.datastore) for store in opened}
        annotates = bool(args.reference or args.datastore or args.cache)
        engine = RequestEngine(
            model,
            tokenizer,
            drafters,
            max_seconds=args.max_seconds,
            max_waiting=args.max_waiting,
            isolates=args.isolate,
            max_rows=args.max_rows,
            source_names=source_names if annotates else None,
        )
        engine.start()
        names = args.served_model_name or [name_for_people(args.model)]
        served = ServedModel(names, tokenizer, model.config, args.max_new_tokens)
        is_local = ip_address(listening.getsockname()[0]).is_loopback
        hosts = ["localhost", "127.0.0.1", "[::1]", args.host] if is_local else None
        app = make_app(served, engine, args.max_body_bytes, hosts, keys, args.allowed_origins)
        server = Server(app, engine)
        logger.info("%s is served at %s; ctrl-C ends it", names[0], url(listening))
        if hosts is None and not keys:
            logger.warning("everyone who can reach %s can use it", url(listening))
        with suppress(KeyboardInterrupt):  # which uvicorn repeats when it has ended
            server.run([listening])
        engine.close(_PASS_SECONDS)
    return 130 if server.force_exit else 0
