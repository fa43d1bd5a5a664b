package dev.bough.follow;

import dev.bough.v1.AgentInvocation;
import dev.bough.v1.Invocation;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The agents of a run in preorder: each before those that it called. */
public final class Tree {
  private Tree() {}

  /**
   * An agent of a tree.
   *
   * @param invocation what is known of it
   * @param path the names from the root down, joined with a slash
   */
  public record Node(AgentInvocation invocation, String path) {}

  /** Returns the agents of a tree, which is in preorder already. */
  public static List<Node> walk(Invocation tree) {
    Map<String, String> paths = new HashMap<>();
    return tree.getAgentsList().stream()
        .map(
            agent -> {
              var above = paths.get(agent.getParentInvocationId());
              var path = above == null ? agent.getName() : above + "/" + agent.getName();
              paths.put(agent.getInvocationId(), path);
              return new Node(agent, path);
            })
        .toList();
  }
}
