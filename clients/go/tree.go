package bough

import (
	"iter"
	"slices"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Tree is the record of a run with its agents as a tree, which is the forest that their order and depth describe.
type Tree struct {
	// Invocation is the record.
	Invocation *boughv1.Invocation
	nodes      []*Node // in preorder
	roots      []*Node
}

// Node is the execution of one agent.
type Node struct {
	*boughv1.AgentInvocation
	tree     *Tree
	parent   *Node
	children []*Node
}

// NewTree makes the tree of a record.
func NewTree(invocation *boughv1.Invocation) *Tree {
	tree := &Tree{Invocation: invocation}
	var path []*Node // from a root to the node before
	for _, agent := range invocation.GetAgents() {
		node := &Node{AgentInvocation: agent, tree: tree}
		tree.nodes = append(tree.nodes, node)
		path = path[:min(max(int(agent.GetDepth()), 0), len(path))]
		if len(path) == 0 {
			tree.roots = append(tree.roots, node)
		} else {
			node.parent = path[len(path)-1]
			node.parent.children = append(node.parent.children, node)
		}
		path = append(path, node)
	}
	return tree
}

// Roots returns the agents that no other agent of the record called: one, in the record of a run.
func (t *Tree) Roots() []*Node { return t.roots }

// Walk returns every agent in preorder: a caller before what it called, in the order of the calls.
func (t *Tree) Walk() iter.Seq[*Node] { return slices.Values(t.nodes) }

// Find returns the first agent of that name in preorder; nil if there is none.
func (t *Tree) Find(name string) *Node {
	for _, node := range t.nodes {
		if node.GetName() == name {
			return node
		}
	}
	return nil
}

// Node returns the agent with that invocation id; nil if there is none.
func (t *Tree) Node(invocationID string) *Node {
	for _, node := range t.nodes {
		if node.GetInvocationId() == invocationID {
			return node
		}
	}
	return nil
}

// Parent returns the agent that called this one; nil for a root.
func (n *Node) Parent() *Node { return n.parent }

// Children returns the agents that this one called, in the order of the calls.
func (n *Node) Children() []*Node { return n.children }

// Walk returns this agent and every agent below it in preorder.
func (n *Node) Walk() iter.Seq[*Node] {
	return func(yield func(*Node) bool) { n.walk(yield) }
}

func (n *Node) walk(yield func(*Node) bool) bool {
	if !yield(n) {
		return false
	}
	for _, child := range n.children {
		if !child.walk(yield) {
			return false
		}
	}
	return true
}

// Path returns the names of the agents from the root down to this one.
func (n *Node) Path() []string {
	if n.parent == nil {
		return []string{n.GetName()}
	}
	return append(n.parent.Path(), n.GetName())
}

// Tools returns the tool calls of this agent, in their order.
func (n *Node) Tools() []*boughv1.ToolInvocation {
	var tools []*boughv1.ToolInvocation
	for _, tool := range n.tree.Invocation.GetTools() {
		if tool.GetInvocationId() == n.GetInvocationId() {
			tools = append(tools, tool)
		}
	}
	return tools
}
