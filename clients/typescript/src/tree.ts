import type { AgentInvocation, Invocation, ToolInvocation } from "./bough/v1/index.js";

/** The agents of a run's record, which lists them in preorder, as a tree. */
export class AgentTree {
  readonly #byId: ReadonlyMap<string, AgentInvocation>;
  readonly #children = new Map<string, AgentInvocation[]>();

  constructor(readonly invocation: Invocation) {
    this.#byId = new Map(invocation.agents.map((agent) => [agent.invocationId, agent]));
    for (const agent of invocation.agents) {
      const siblings = this.#children.get(agent.parentInvocationId) ?? [];
      this.#children.set(agent.parentInvocationId, siblings);
      siblings.push(agent);
    }
  }

  /** The agents without a parent: the root, unless events of several runs or without their start were aggregated. */
  get roots(): AgentInvocation[] {
    return this.invocation.agents.filter((agent) => !this.parent(agent));
  }

  /** The agents in preorder: each before those that it called. */
  [Symbol.iterator](): IterableIterator<AgentInvocation> {
    return this.invocation.agents.values();
  }

  /** The agents that an agent called, in order. */
  children(agent: AgentInvocation): AgentInvocation[] {
    return this.#children.get(agent.invocationId) ?? [];
  }

  /** The agent that called an agent. */
  parent(agent: AgentInvocation): AgentInvocation | undefined {
    return this.get(agent.parentInvocationId);
  }

  /** The tool calls that an agent made, in order; calls of agents are among them. */
  tools(agent: AgentInvocation): ToolInvocation[] {
    return this.invocation.tools.filter((call) => call.invocationId === agent.invocationId);
  }

  /** The agent with this invocation id. */
  get(invocationId: string): AgentInvocation | undefined {
    return this.#byId.get(invocationId);
  }

  /** The invocations of the agent of this name, in preorder. */
  find(name: string): AgentInvocation[] {
    return this.invocation.agents.filter((agent) => agent.name === name);
  }

  /** The agents from the root down to an agent. */
  path(agent: AgentInvocation): AgentInvocation[] {
    const path = [agent];
    // A record of inconsistent events may have a circle of parents.
    for (let at = this.parent(agent); at && path.length <= agent.depth; at = this.parent(at)) {
      path.unshift(at);
    }
    return path;
  }
}
