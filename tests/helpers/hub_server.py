"""A small Hugging Face Hub on 127.0.0.1: what repos and their files need, and faults on demand."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub
import transformers.utils.hub
from huggingface_hub import constants

TOKEN = "hf_of_the_owner"
OWNER = "owner"


@dataclass(frozen=True)
class Blob:
    """A file's content, and whether it came as a large file."""

    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        if self.large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repo:
    """A repo: all its commits, each with its files, and its branches."""

    private: bool = False
    gated: bool = False
    sdk: str | None = None  # of a Space
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, Blob]) -> str:
        sha = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def files(self, branch: str = "main") -> dict[str, bytes]:
        """The content of a branch."""
        blobs = self.commits[self.branches[branch]]
        return {name: blob.content for name, blob in blobs.items()}


@dataclass
class Fault:
    """Cuts the connection in the middle of a body, the server's or for PUT and POST the client's:
    in all requests of a method whose path contains `path`."""

    method: str
    path: str
    after: int


class Hub:
    """What is stored, and the server: the Hub at `endpoint`, its large files at `storage`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}  # large files by checksum, committed or not
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # each a method and a path
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        # Under another name: the client recognises a redirection within the Hub by the host.
        self.storage = f"http://localhost:{self.server.server_port}"

    def create(self, name: str, **attributes: bool) -> Repo:
        repo = self.repos[name] = Repo(**attributes)
        repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})
        return repo

    def asked_for(self, method: str, part: str = "") -> list[str]:
        return [r for r in self.requests if r.startswith(method + " ") and part in r]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()


class HubError(Exception):
    """An answer that is an error, as the Hub words it."""

    def __init__(self, status: int, code: str = "", **content: str) -> None:
        super().__init__(code)
        self.status, self.code, self.content = status, code, content


class ConnectionCut(Exception):
    """A fault has happened."""


_REPO = r"(?P<name>[^/]+/[^/]+?)"
_KIND = "(datasets|models|spaces)"
_ROUTES = [
    ("POST", r"/api/repos/create", "create_repo"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("GET", rf"/api/{_KIND}/{_REPO}(/revision/(?P<revision>[^/]+))?", "info"),
    ("GET", rf"/api/{_KIND}/{_REPO}/tree/(?P<revision>[^/]+)", "tree"),
    ("POST", rf"/api/{_KIND}/{_REPO}/branch/(?P<branch>[^/]+)", "create_branch"),
    ("POST", rf"/api/{_KIND}/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/{_KIND}/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"(/datasets|/spaces)?/{_REPO}\.git/info/lfs/objects/batch", "large_file_batch"),
    ("PUT", r"/storage/(?P<oid>[0-9a-f]{64})", "store_large_file"),
    ("GET", r"/storage/(?P<oid>[0-9a-f]{64})", "read_large_file"),
    ("GET", rf"(/datasets|/spaces)?/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.path, self.creates_pr = url.path, "create_pr=1" in url.query
        asked = f"{self.command} {unquote(self.path)}"
        self.hub.requests.append(asked)
        faults = (f for f in self.hub.faults if f.method == self.command and f.path in asked)
        self.fault = next(faults, None)
        try:
            self.body = self.read_body()
            method = "GET" if self.command == "HEAD" else self.command
            for route_method, pattern, name in _ROUTES:
                match = re.fullmatch(pattern, self.path)
                if method == route_method and match:
                    parts = {k: v and unquote(v) for k, v in match.groupdict().items()}
                    getattr(self, name)(**parts)
                    return
            raise HubError(404, error="no such page")
        except HubError as error:
            headers = {"X-Error-Code": error.code} if error.code else {}
            self.send_json({"error": error.code, **error.content}, error.status, headers)
        except ConnectionCut:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = answer

    # Bodies

    def read_body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        if self.fault and self.command in ("PUT", "POST"):
            self.rfile.read(min(self.fault.after, size))
            raise ConnectionCut
        return self.rfile.read(size)

    def send_body(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault:
            self.wfile.write(body[: self.fault.after])
            raise ConnectionCut
        self.wfile.write(body)

    def send_json(self, content: object, status: int = 200, headers: dict | None = None) -> None:
        headers = {"Content-Type": "application/json", **(headers or {})}
        self.send_body(json.dumps(content).encode(), status, headers)

    # Who may do what

    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def check_owner(self) -> None:
        if not self.is_owner():
            raise HubError(401, error="Invalid username or password.")

    def repo_to_read(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.is_owner()):
            # A stranger does not learn which of the two is the case.
            raise HubError(404 if self.is_owner() else 401, "RepoNotFound")
        return repo

    def repo_to_write(self, name: str) -> Repo:
        self.check_owner()
        return self.repo_to_read(name)

    def sha_of(self, repo: Repo, revision: str | None) -> str:
        revision = revision or "main"
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise HubError(404, "RevisionNotFound")
        return sha

    # Pages

    def create_repo(self) -> None:
        self.check_owner()
        asked = json.loads(self.body)
        kind = asked.get("type", "model")
        name = f"{asked['organization'] or OWNER}/{asked['name']}"
        url = self.url_of(kind, name)
        if kind == "space" and asked.get("sdk") != "gradio":
            raise HubError(400, error="a Space needs an SDK")
        if name in self.hub.repos:
            raise HubError(409, url=url, error=f"You already created this {kind} repo")
        self.hub.create(name, private=asked.get("visibility") == "private").sdk = asked.get("sdk")
        self.send_json({"url": url})

    def url_of(self, kind: str, name: str) -> str:
        return f"{self.hub.endpoint}/{'' if kind == 'model' else f'{kind}s/'}{name}"

    def create_branch(self, name: str, branch: str) -> None:
        repo = self.repo_to_write(name)
        if branch in repo.branches:
            raise HubError(409, error="Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        self.send_json({})

    def validate_card(self) -> None:
        wrong = "license: proprietary" in json.loads(self.body)["content"]
        errors = [{"message": "unknown license"}] if wrong else []
        self.send_json({"errors": errors, "warnings": []}, 400 if wrong else 200)

    def info(self, name: str, revision: str | None) -> None:
        repo = self.repo_to_read(name)
        sha = self.sha_of(repo, revision)
        siblings = [{"rfilename": file} for file in repo.commits[sha]]
        about = {"id": name, "sha": sha, "private": repo.private, "tags": []}
        self.send_json({**about, "siblings": siblings})

    def tree(self, name: str, revision: str) -> None:
        repo = self.repo_to_read(name)
        entries = []
        for file, blob in repo.commits[self.sha_of(repo, revision)].items():
            about = {"size": len(blob.content), "oid": blob.oid}
            large = {"lfs": {**about, "pointerSize": 130}} if blob.large else {}
            entries.append({"type": "file", "path": file, **about, **large})
        self.send_json(entries)

    def preupload(self, name: str, revision: str) -> None:
        repo = self.repo_to_write(name)
        present = repo.commits[self.sha_of(repo, revision)]
        files = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            oid = present[path].oid if path in present else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": files})

    def large_file_batch(self, name: str) -> None:
        self.repo_to_write(name)
        objects = json.loads(self.body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.hub.uploads:
                href = f"{self.hub.storage}/storage/{entry['oid']}"
                entry["actions"] = {"upload": {"href": href}}
        self.send_json({"transfer": "basic", "objects": objects})

    def store_large_file(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, error="the checksum is another")
        self.hub.uploads[oid] = self.body
        self.send_json({})

    def read_large_file(self, oid: str) -> None:
        self.send_body(self.hub.uploads[oid], 200, {"ETag": f'"{oid}"'})

    def commit(self, name: str, revision: str) -> None:
        repo = self.repo_to_write(name)
        lines = [json.loads(line) for line in self.body.splitlines()]
        with self.hub.lock:
            parent = self.sha_of(repo, revision)
            files = dict(repo.commits[parent])
            for line in lines:
                value = line["value"]
                match line["key"]:
                    case "header":
                        if value.get("parentCommit", parent) != parent:
                            raise HubError(412, error="A commit has happened since.")
                    case "file":
                        files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
                    case "lfsFile":
                        files[value["path"]] = Blob(self.hub.uploads[value["oid"]], True)
                    case "deletedFile":
                        del files[value["path"]]
            branch = f"refs/pr/{len(repo.commits)}" if self.creates_pr else revision
            sha = repo.commit(branch, files)
        kind = self.path.split("/")[2].removesuffix("s")
        url = self.url_of(kind, name)
        self.send_json(
            {
                "commitUrl": f"{url}/commit/{sha}",
                "commitOid": sha,
                "pullRequestUrl": f"{url}/discussions/1" if self.creates_pr else None,
            }
        )

    def resolve(self, name: str, revision: str, file: str) -> None:
        repo = self.repo_to_read(name)
        if repo.gated and not self.is_owner():
            raise HubError(401, "GatedRepo")
        sha = self.sha_of(repo, revision)
        blob = repo.commits[sha].get(file)
        if blob is None:
            raise HubError(404, "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"'}
        if not blob.large:
            self.send_body(blob.content, 200, headers)
            return
        headers["Location"] = f"{self.hub.storage}/storage/{blob.oid}"
        headers["X-Linked-Etag"] = headers["ETag"]
        headers["X-Linked-Size"] = str(len(blob.content))
        self.send_body(b"", 302, headers)


@contextmanager
def hub_in_place(monkeypatch, tmp_path) -> Iterator[Hub]:
    """A Hub that huggingface_hub takes for the real one, whose owner is logged in."""
    with running_hub() as server:
        point_to(server.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / ".cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        huggingface_hub.close_session()


def point_to(endpoint: str, monkeypatch) -> None:
    """Another address for the Hub."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # transformers keeps the address of its first call, and waits where nobody answers any more.
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
