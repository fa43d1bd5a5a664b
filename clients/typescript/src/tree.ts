import type { AgentInvocation, Invocation } from "./bough/v1/index.js";

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
    return this.#byId.get(agent.parentInvocationId);
  }

  /** The agent with this invocation id, or else the first one of this name. */
  find(idOrName: string): AgentInvocation | undefined {
    return this.#byId.get(idOrName) ?? this.invocation.agents.find((agent) => agent.name === idOrName);
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
