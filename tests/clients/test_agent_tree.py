"""The agent tree: preorder, children, parents, paths and tools."""

from bough import AgentTree
from bough.v1 import AgentInvocation, Invocation, ToolInvocation


def _agent(id: str, name: str, parent: str = "") -> AgentInvocation:
    return AgentInvocation(invocation_id=id, name=name, parent_invocation_id=parent)


TREE = AgentTree(
    Invocation(
        agents=[
            _agent("1", "lead"),
            _agent("2", "researcher", "1"),
            _agent("3", "reader", "2"),
            _agent("4", "writer", "1"),
            _agent("5", "reader", "4"),
        ],
        tools=[
            ToolInvocation(invocation_id="1", name="call_researcher", child_invocation_id="2"),
            ToolInvocation(invocation_id="3", name="search"),
            ToolInvocation(invocation_id="1", name="call_writer", child_invocation_id="4"),
        ],
    )
)


def _ids(agents: list[AgentInvocation]) -> list[str]:
    return [agent.invocation_id for agent in agents]


def test_a_tree_is_walked_in_preorder() -> None:
    assert _ids(list(TREE)) == ["1", "2", "3", "4", "5"]
    assert len(TREE) == 5


def test_agents_are_found_by_name_and_by_id() -> None:
    assert _ids(TREE.find("reader")) == ["3", "5"]
    assert TREE.find("cook") == []
    assert TREE.get("4") == _agent("4", "writer", "1")
    assert TREE.get("6") is None


def test_the_way_up_and_down_the_tree() -> None:
    assert TREE.root == _agent("1", "lead")
    children = TREE.children(TREE.root)
    assert _ids(children) == ["2", "4"]
    assert [TREE.parent(agent) for agent in children] == [TREE.root, TREE.root]
    assert TREE.parent(TREE.root) is None
    assert _ids(TREE.path(TREE.find("reader")[1])) == ["1", "4", "5"]


def test_tools_are_those_of_one_agent() -> None:
    root, reader = TREE.root, TREE.find("reader")[0]
    assert root is not None
    assert [tool.name for tool in TREE.tools(root)] == ["call_researcher", "call_writer"]
    assert [tool.name for tool in TREE.tools(reader)] == ["search"]


def test_an_empty_tree_has_no_root_and_a_circle_of_parents_ends() -> None:
    assert AgentTree(Invocation()).root is None
    circle = AgentTree(Invocation(agents=[_agent("1", "a", "2"), _agent("2", "b", "1")]))
    assert len(circle.path(circle.find("a")[0])) == 3
