"""`hf-refspec serve`."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from contextlib import suppress

from ...drafting.compilation import drafting_kernels
from ...extras import require
from ..shared.loading import load_config, load_model, load_tokenizer, name_for_people
from .answering import add_sources, sources
from .arguments import add_model, listen, log_to_stderr, port, positive, quieten_transformers

logger = logging.getLogger("hf_refspec")

_PASS_SECONDS = 5  # how long a second ctrl-C waits for the forward pass that is under way
_LIMITS = (
    ("--max-new-tokens", 2048, "of an answer; as many where a request does not say it (2048)"),
    ("--max-seconds", 600, "for which one request is decoded (600)"),
    ("--max-body-bytes", 4 << 20, "of a request (4 MiB)"),
    ("--max-waiting", 64, "further requests, which wait (64)"),
)


def add_serve(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--host", default="127.0.0.1", help="where to listen; only on this machine by default")
    add("--port", type=port, default=8000, metavar="N", help="8000 by default; 0 for a free one")
    add_sources(parser.add_argument_group("texts"))
    add(
        "--isolate",
        action="store_true",
        help="learn no drafts from one request for the next: slower, but the speed tells no client "
        "what others asked",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-rows",
        type=positive,
        metavar="N",
        help="requests that are decoded together (by default as many as half of the free memory "
        "holds, of 4,096 tokens each: 16 at most on a CPU, 64 elsewhere)",
    )
    for option, default, help in _LIMITS:
        limits.add_argument(option, type=positive, default=default, metavar="N", help=help)


def serve(args: Namespace) -> int:
    """Serves until ctrl-C."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "hf-refspec serve", "serve")
    from ..serve.app import make_app
    from ..serve.engine import Engine
    from ..serve.served_model import ServedModel
    from ..serve.server import Server, is_local, url

    if args.isolate and args.cache is not None:
        raise ValueError("--cache keeps answers for later requests; leave out it or --isolate")
    quieten_transformers()
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    with listen(args.host, args.port) as listening:
        load_config(args.model)  # refuses anything but a language model before it loads more
        tokenizer = load_tokenizer(args.model)
        drafters = sources(args, tokenizer)
        drafting_kernels.ready()  # or they are compiled while the model is loaded
        model = load_model(args.model, args.device_map, args.dtype)
        limits = args.max_seconds, args.max_waiting
        engine = Engine(model, tokenizer, drafters, *limits, args.isolate, args.max_rows)
        engine.start()
        name = name_for_people(args.model)
        served = ServedModel(name, tokenizer, model.config, args.max_new_tokens)
        hosts = ["localhost", "127.0.0.1", "[::1]", args.host] if is_local(listening) else None
        server = Server(make_app(served, engine, args.max_body_bytes, hosts), engine)
        logger.info("%s is served at %s; ctrl-C ends it", name, url(listening))
        if hosts is None:
            logger.warning("everyone who can reach %s can use it", url(listening))
        with suppress(KeyboardInterrupt):  # which uvicorn repeats when it has ended
            server.run([listening])
        engine.close(_PASS_SECONDS)
    return 130 if server.force_exit else 0
