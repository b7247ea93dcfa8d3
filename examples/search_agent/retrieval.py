"""A search engine over a corpus of documents, as a server on this machine.

    POST /retrieve {"queries": [...], "topk": 3, "return_scores": false}
    -> {"result": [[{"wikipedia_title", "contents"}, ...] for each query]}

With `return_scores` each hit is {"document": {...}, "score": float}. The index is BM25 (bm25s);
with `--dense MODEL` it is the cosine of mean hidden states of a transformers encoder. The server
listens on loopback and wants its key as a bearer token.

    RETRIEVAL_KEY=... python examples/search_agent/retrieval.py --port 5001
"""

import argparse
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import bm25s
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

CORPUS = Path(__file__).resolve().parent / "data" / "corpus.jsonl"
MOST_QUERIES = 256

Document = dict[str, str]
Hits = list[tuple[Document, float]]
"""Documents with their scores, best first; fewer than asked for where no more match."""


class Index(Protocol):
    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """The `topk` best documents of each query."""


class BM25Index:
    """Words that a query and a document share, rare ones counting more."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._bm25 = bm25s.BM25()
        self._bm25.index(
            bm25s.tokenize([_text(document) for document in documents], show_progress=False),
            show_progress=False,
        )

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        topk = min(topk, len(self._documents))
        tokens = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        found, scores = self._bm25.retrieve(tokens, k=topk, show_progress=False)
        return [
            # A document that shares no word with the query is no hit.
            [(self._documents[i], float(s)) for i, s in zip(row, points, strict=True) if s > 0]
            for row, points in zip(found, scores, strict=True)
        ]


class DenseIndex:
    """The cosine between the mean hidden states of query and document."""

    def __init__(self, documents: Sequence[Document], model: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._documents = documents
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model).eval()
        self._vectors = self._embed([_text(document) for document in documents])  # [D, H]

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        scores = self._embed(queries) @ self._vectors.T  # [Q, D]
        best = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
        return [
            [(self._documents[i], float(points[i])) for i in row]
            for row, points in zip(best, scores, strict=True)
        ]

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of length 1, float32 [texts, H]."""
        import torch

        batch = self._tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            hidden = self._model(**batch).last_hidden_state  # [texts, tokens, H]
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors: np.ndarray = torch.nn.functional.normalize(mean, dim=-1).float().numpy()
        return vectors


def _text(document: Document) -> str:
    return f"{document['title']} {document['contents']}"


def read_corpus(path: Path = CORPUS) -> list[Document]:
    """The documents of a file with one JSON object, of `title` and `contents`, in each line."""
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        document = json.loads(line)
        if not {"title", "contents"} <= document.keys():
            raise ValueError(f"{path}, line {number}: a document needs title and contents")
        documents.append(document)
    return documents


def create_app(index: Index, key: str) -> Starlette:
    """The server's application."""

    async def retrieve(request: Request) -> JSONResponse:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return JSONResponse({"error": "send the server's key as a bearer token"}, 401)
        try:
            queries, topk, scores = _checked(await request.json())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        found = await run_in_threadpool(index.search, queries, topk)
        return JSONResponse({"result": [[_hit(*hit, scores) for hit in hits] for hits in found]})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def _checked(body: Any) -> tuple[list[str], int, bool]:
    """Raises ValueError for a body of another form."""
    if not isinstance(body, dict):
        raise ValueError("the body must be an object with queries, topk and return_scores")
    queries, topk = body.get("queries"), body.get("topk", 3)
    scores = body.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"queries is {queries!r:.80}: give a list of texts")
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"{len(queries)} queries: give at most {MOST_QUERIES}")
    if type(topk) is not int or topk < 1:
        raise ValueError(f"topk is {topk!r:.80}: give a whole number above 0")
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores is {scores!r:.80}: give true or false")
    return queries, topk, scores


def _hit(document: Document, score: float, with_score: bool) -> dict[str, Any]:
    named = {"wikipedia_title": document["title"], "contents": document["contents"]}
    return {"document": named, "score": score} if with_score else named


@dataclass(frozen=True)
class Retrieval:
    """Where a running server is."""

    url: str
    key: str


@contextmanager
def serving(index: Index) -> Iterator[Retrieval]:
    """A server in a thread of this process, on a free port of loopback, with a key of its own."""
    key = secrets.token_urlsafe(24)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(index, key), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="retrieval", daemon=True
    )
    thread.start()
    try:
        # The socket listens already: requests wait until the server takes them.
        yield Retrieval(f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a corpus on this machine.")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="JSON lines")
    parser.add_argument("--port", type=int, default=5001)
    parser.add_argument("--dense", metavar="MODEL", help="an encoder instead of BM25")
    options = parser.parse_args()
    documents = read_corpus(options.corpus)
    index = DenseIndex(documents, options.dense) if options.dense else BM25Index(documents)
    key = os.environ.get("RETRIEVAL_KEY") or secrets.token_urlsafe(24)
    if "RETRIEVAL_KEY" not in os.environ:
        print(f"RETRIEVAL_KEY={key}", flush=True)
    uvicorn.run(create_app(index, key), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
