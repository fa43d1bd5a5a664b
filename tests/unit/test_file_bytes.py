"""The bytes of files in a request, counted before it is parsed: as many as the parsed request has, whatever it is."""

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import fork_pb2, input_pb2, message_pb2
from bough_server.interceptors.file_bytes import REQUESTS, count_file_bytes
from bough_server.log.blobs import blobs_anywhere

Request = pb.RunRequest | pb.ResumeRunRequest | pb.ForkRunRequest

BLOBS = st.builds(
    message_pb2.Blob, data=st.binary(max_size=300), media_type=st.text(max_size=5), size_bytes=st.integers(0, 2**40)
)
FLAT = st.one_of(
    st.builds(message_pb2.Part, blob=BLOBS),
    st.builds(message_pb2.Part, text=st.text(max_size=200), truncated=st.booleans()),
)
PARTS = st.lists(
    st.one_of(FLAT, st.builds(message_pb2.Part, tool_result=st.builds(message_pb2.ToolResult, parts=st.lists(FLAT)))),
    max_size=6,
)
OUTCOMES = st.builds(message_pb2.ToolOutcome, parts=PARTS)
MESSAGES = st.builds(message_pb2.Message, parts=PARTS, position=st.integers(-5, 5))
REQUESTS_MADE: st.SearchStrategy[Request] = st.one_of(
    st.builds(pb.RunRequest, agent=st.text(max_size=9), input=MESSAGES),
    st.builds(
        pb.ResumeRunRequest,
        answers=st.lists(st.builds(input_pb2.InputAnswer, tool_outcome=OUTCOMES), max_size=4),
        after_sequence=st.integers(0, 9),
    ),
    st.builds(
        pb.ForkRunRequest,
        changes=st.builds(
            fork_pb2.ForkChanges,
            input=MESSAGES,
            tool_results=st.lists(st.builds(fork_pb2.EditedResult, outcome=OUTCOMES), max_size=3),
        ),
    ),
)


@given(REQUESTS_MADE)
def test_it_counts_what_the_parsed_request_has(request: Request) -> None:
    counted = count_file_bytes(request.SerializeToString(), REQUESTS[request.DESCRIPTOR.name])
    assert counted == sum(len(blob.data) for blob in blobs_anywhere(request))


@given(REQUESTS_MADE, st.data())
def test_what_is_cut_or_changed_raises_nothing_and_counts_no_more_than_there_is(
    request: Request, data: st.DataObject
) -> None:
    whole = bytearray(request.SerializeToString())
    if whole:
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    assert 0 <= count_file_bytes(cut, REQUESTS[request.DESCRIPTOR.name]) <= len(cut)


@given(st.binary(max_size=200))
def test_garbage_raises_nothing(data: bytes) -> None:
    for request in REQUESTS.values():
        assert 0 <= count_file_bytes(data, request) <= len(data)
