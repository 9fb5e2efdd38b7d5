"""Page tokens work for the query they were made for, and for nothing else."""

import base64

import pytest
from fencepost.v1 import job_service_pb2
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.errors import InvalidPageToken

TOKENS = PageTokens(key=b"k" * 32)
QUERY = query_hash(job_service_pb2.ListJobsRequest(parent="tenants/a", filter="kind:x"))


def test_a_token_gives_its_key_back() -> None:
    token = TOKENS.make(["0197", 12_345_678_901_234_567], query=QUERY)
    assert TOKENS.read(token, query=QUERY) == ["0197", 12_345_678_901_234_567]
    assert token.isascii()


def test_size_and_token_are_no_part_of_the_query() -> None:
    same = job_service_pb2.ListJobsRequest(
        parent="tenants/a", filter="kind:x", page_size=7, page_token="t"
    )
    assert query_hash(same) == QUERY
    assert same.page_token == "t"


@pytest.mark.parametrize(
    "other",
    [
        job_service_pb2.ListJobsRequest(parent="tenants/b", filter="kind:x"),
        job_service_pb2.ListJobsRequest(parent="tenants/a"),
        job_service_pb2.ListFiresRequest(parent="tenants/a"),
    ],
)
def test_a_token_of_another_query_is_refused(other: job_service_pb2.ListJobsRequest) -> None:
    token = TOKENS.make(["x"], query=QUERY)
    with pytest.raises(InvalidPageToken):
        TOKENS.read(token, query=query_hash(other))


def test_every_altered_byte_is_noticed() -> None:
    raw = base64.urlsafe_b64decode(TOKENS.make(["x"], query=QUERY) + "==")
    for index in range(len(raw)):
        altered = bytearray(raw)
        altered[index] ^= 1
        with pytest.raises(InvalidPageToken):
            TOKENS.read(base64.urlsafe_b64encode(altered).decode(), query=QUERY)


@pytest.mark.parametrize("token", ["x", "%%%", "", "é", "A" * 5000, "AAAA", "\x00"])
def test_made_up_tokens_are_refused(token: str) -> None:
    with pytest.raises(InvalidPageToken) as caught:
        TOKENS.read(token, query=QUERY)
    assert caught.value.field == "page_token"


def test_a_token_of_another_database_is_refused() -> None:
    token = PageTokens(key=b"o" * 32).make(["x"], query=QUERY)
    with pytest.raises(InvalidPageToken):
        TOKENS.read(token, query=QUERY)
