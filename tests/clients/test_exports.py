"""Names that users import: from `bough`, from `bough.v1`, and the one text of a message."""

from hypothesis import given
from hypothesis import strategies as st

import bough
import bough.v1
import bough_server
from bough.v1 import Blob, Message, Part, Reasoning, ToolCall, ToolResult

TEXTS = st.text(max_size=20)
PARTS = st.one_of(
    st.builds(Part, text=TEXTS),
    st.builds(Part, data_json=TEXTS),
    st.builds(Part, blob=st.builds(Blob, uri=TEXTS)),
    st.builds(Part, reasoning=st.builds(Reasoning, text=TEXTS)),
    st.builds(Part, tool_call=st.builds(ToolCall, name=TEXTS)),
    st.builds(Part, tool_result=st.builds(ToolResult, parts=st.lists(st.builds(Part, text=TEXTS), max_size=2))),
    st.just(Part()),
)


def test_the_package_and_its_messages_share_no_name() -> None:
    assert set(bough.__all__) & set(bough.v1.__all__) == set()
    assert len(bough.v1.__all__) > 300


@given(message=st.builds(Message, parts=st.lists(PARTS, max_size=5)))
def test_client_and_server_read_the_same_text_of_a_message(message: Message) -> None:
    assert bough.text_of(message) == bough_server.text_of(message)


def test_the_text_of_a_message_is_its_texts_and_its_json() -> None:
    message = Message(parts=[Part(text="Hi "), Part(data_json='{"a":1}'), Part(blob=Blob(uri="file:///a.png"))])
    assert bough.text_of(message) == 'Hi {"a":1}'
