"""The routes of datastores whose documents clients change while drafts are looked up in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field

from ...store.datastore import Datastore
from ...store.files import DatastoreError
from .errors import ApiError, Places
from .protocol import RequestObject, Text, parsed


class DocumentsRequest(RequestObject):
    """The body of `POST /v1/stores/{store}/documents`: texts, or texts by their names."""

    documents: dict[Text, Text] | list[Text] = Field(min_length=1)


def add_store_routes(
    app: FastAPI, stores: Mapping[str, Datastore], read: Callable[[Request], Any]
) -> None:
    """Answers requests that list and change documents, which `read` receives, one after another."""
    writer = ThreadPoolExecutor(1, "writer")
    places = Places("requests wait for a datastore")

    async def answered(name: str, change: Callable[[Datastore], Any]) -> dict[str, Any]:
        def about() -> dict[str, Any]:
            try:
                more = change(store := stores[name]) or {}
            except KeyError:
                raise ApiError(404, "there is no such store or document") from None
            except ValueError as error:
                status = 409 if isinstance(error, DatastoreError) else 400
                raise ApiError(status, str(error)) from None
            counts = {"document_count": store.documents, "token_count": store.tokens}
            return {"store": name, **counts, **more}

        with places:
            return await asyncio.get_running_loop().run_in_executor(writer, about)

    @app.get("/v1/stores/{store}/documents")
    async def documents(store: str) -> dict[str, Any]:
        return await answered(store, lambda opened: {"documents": opened.names()})

    @app.post("/v1/stores/{store}/documents")
    async def add(store: str, http: Request) -> dict[str, Any]:
        body = await read(http)

        def change(opened: Datastore) -> None:
            texts = parsed(DocumentsRequest, body).documents
            # In a list, texts that name files of this machine would be paths.
            opened.add(texts if isinstance(texts, dict) else iter(texts), progress=False)

        return await answered(store, change)

    @app.delete("/v1/stores/{store}/documents/{name:path}")
    async def remove(store: str, name: str) -> dict[str, Any]:
        return await answered(store, lambda opened: opened.remove(name))
