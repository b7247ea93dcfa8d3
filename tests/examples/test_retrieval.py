"""The search agent's search engine: what it finds, and whom it answers."""

import json
from pathlib import Path

import httpx
import pytest

from examples.search_agent import make_data
from examples.search_agent.retrieval import BM25Index, DenseIndex, read_corpus, serving

DATA = Path(make_data.__file__).parent / "data"


@pytest.fixture(scope="module")
def documents():
    return read_corpus()


@pytest.fixture(scope="module")
def ask(documents):
    with serving(BM25Index(documents)) as server:

        def ask(body, key=server.key):
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/retrieve", json=body, headers=headers)

        yield ask


def test_the_generator_reproduces_the_shipped_world(tmp_path):
    make_data.write(tmp_path)
    for name in ("corpus.jsonl", "train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_every_question_can_be_answered_by_looking_up_what_leads_to_it(documents):
    index = BM25Index(documents)
    world = make_data.World(__import__("random").Random(make_data.SEED))
    questions = world.questions()
    assert len({question.text for question in questions}) == len(questions) == 510
    for question in questions:
        ((best, _), *_) = index.search([question.lookups[-1]], 3)[0]
        assert question.answer in best["contents"]
        assert len(question.lookups) == len(question.findings)


def test_each_query_gets_the_best_documents_with_scores_if_asked(ask, documents):
    title = documents[0]["title"]
    body = {"queries": [title, "Arlon"], "topk": 2, "return_scores": False}
    first, second = ask(body).json()["result"]
    assert first[0] == {"wikipedia_title": title, "contents": documents[0]["contents"]}
    assert [len(first), len(second)] == [2, 2]
    scored = ask({**body, "return_scores": True}).json()["result"][0]
    assert [hit["document"] for hit in scored] == first
    assert scored[0]["score"] > scored[1]["score"] > 0


def test_words_that_are_nowhere_find_nothing(ask):
    assert ask({"queries": ["xylophone"]}).json()["result"] == [[]]


def test_who_does_not_have_the_key_gets_no_answer(ask):
    assert ask({"queries": ["Arlon"]}, key="another").status_code == 401


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "the body must be an object"),
        ({"queries": "Arlon"}, "queries is 'Arlon'"),
        ({"queries": [1]}, "queries is"),
        ({"queries": ["a"] * 300}, "300 queries"),
        ({"queries": ["a"], "topk": 0}, "topk is 0"),
        ({"queries": ["a"], "topk": True}, "topk is True"),
        ({"queries": ["a"], "return_scores": 1}, "return_scores is 1"),
    ],
)
def test_a_body_of_another_form_is_refused_by_field(ask, body, problem):
    response = ask(body)
    assert response.status_code == 400
    assert problem in response.json()["error"]


def test_a_corpus_names_the_line_that_is_wrong(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"title": "a", "contents": "b"}) + '\n{"title": "c"}\n')
    with pytest.raises(ValueError, match="line 2: a document needs title and contents"):
        read_corpus(file)


def test_a_dense_index_finds_a_document_by_its_own_text(documents, random_model_path):
    few = documents[:5]
    index = DenseIndex(few, str(random_model_path))
    texts = [f"{document['title']} {document['contents']}" for document in few]
    for document, hits in zip(few, index.search(texts, 2), strict=True):
        assert hits[0][0] == document
        assert hits[0][1] == pytest.approx(1.0, abs=1e-5)
        assert len(hits) == 2
