import {
  type AgentError,
  type AgentEvent,
  CancelReason,
  type EvalTotals,
  type EvaluationEvent,
  ExecutionState,
  type GateResult,
  type InputRequest,
  type Message,
  type Usage,
  Verdict,
} from "./bough/v1/index.js";
import { textOf } from "./messages.js";

/** A run as far as its events show it. */
export interface CollectedRun {
  runId: string;
  sessionId: string;
  /** State after the last event of a kind that this version knows; a run whose stream ended at another one has not ended. */
  state: ExecutionState;
  /** Text of the final answer; empty unless the run has succeeded. */
  text: string;
  /** The final answer; undefined unless the run has succeeded. */
  message: Message | undefined;
  /** Why the run failed or was cancelled. */
  error: AgentError | undefined;
  cancelReason: CancelReason;
  /** The run waits for answers to `openRequests`: answer them with `client.resume`. */
  interrupted: boolean;
  /** Input requests without an answer, in the order in which they were made; an ended run has none. */
  openRequests: InputRequest[];
  /** What the whole tree used; undefined until the run has ended. */
  usage: Usage | undefined;
  /** Sequence to continue after, with `client.watch`. */
  throughSequence: bigint;
}

/**
 * Follow a stream to its end and return its run, in any state: no state is an error.
 *
 * Events are not kept. Pass a run that was collected before to continue it with the events of a later stream.
 */
export async function collect(
  events: AsyncIterable<AgentEvent> & { throughSequence?: bigint },
  earlier?: CollectedRun,
): Promise<CollectedRun> {
  const run: CollectedRun = earlier ? { ...earlier, openRequests: [...earlier.openRequests] } : emptyRun();
  for await (const event of events) {
    if (event.sequence > run.throughSequence) {
      add(run, event);
    }
  }
  const through = events.throughSequence ?? 0n;
  run.throughSequence = through > run.throughSequence ? through : run.throughSequence;
  run.text = textOf(run.message);
  run.interrupted = run.state === ExecutionState.INPUT_REQUIRED;
  return run;
}

function emptyRun(): CollectedRun {
  return {
    runId: "",
    sessionId: "",
    state: ExecutionState.UNSPECIFIED,
    text: "",
    message: undefined,
    error: undefined,
    cancelReason: CancelReason.UNSPECIFIED,
    interrupted: false,
    openRequests: [],
    usage: undefined,
    throughSequence: 0n,
  };
}

function add(run: CollectedRun, { payload, ...event }: AgentEvent): void {
  run.throughSequence = event.sequence;
  run.runId ||= event.runId;
  run.sessionId ||= event.sessionId;
  switch (payload.case) {
    case "runQueued":
      run.state = ExecutionState.PENDING;
      break;
    case "runDequeued":
    case "runResumed":
    case "runForked":
      run.state = ExecutionState.RUNNING;
      break;
    case "runInterrupted":
      // It names every open request; a masked view may not have shown their own events.
      Object.assign(run, { state: ExecutionState.INPUT_REQUIRED, openRequests: payload.value.requests });
      break;
    case "inputRequested":
      run.openRequests = payload.value.request ? [...run.openRequests, payload.value.request] : run.openRequests;
      break;
    case "inputReceived":
      run.openRequests = run.openRequests.filter(({ inputId }) => inputId !== payload.value.answer?.inputId);
      break;
    case "runCompleted":
      end(run, ExecutionState.SUCCEEDED, { usage: payload.value.treeUsage, message: payload.value.finalAnswer });
      break;
    case "runFailed":
      end(run, ExecutionState.FAILED, { usage: payload.value.treeUsage, error: payload.value.error });
      break;
    case "runCancelled":
      end(run, ExecutionState.CANCELLED, { usage: payload.value.treeUsage, error: payload.value.error });
      run.cancelReason = payload.value.cancelReason;
      break;
  }
  run.state ||= ExecutionState.RUNNING;
}

function end(run: CollectedRun, state: ExecutionState, how: Partial<CollectedRun>): void {
  Object.assign(run, how, { state, openRequests: [] });
}

/** An evaluation as far as its events show it. Its cases are not in it: `client.evals` returns them in pages. */
export interface CollectedEvaluation {
  evaluationId: string;
  /** SUCCEEDED if the evaluation has a verdict, whatever that is. */
  state: ExecutionState;
  /** Whether the set passed; unspecified unless the evaluation has succeeded. */
  verdict: Verdict;
  /** Why it did not pass, as far as neither a case nor a gate says so; empty if they say all. */
  reason: string;
  /** Numbers over all cases, of a cancelled evaluation over what was scored; undefined if it failed or has not ended. */
  totals: EvalTotals | undefined;
  /** The gates in the order of the request; empty unless the evaluation has succeeded. */
  gates: GateResult[];
  /** Why the evaluation failed or was cancelled. */
  error: AgentError | undefined;
  /** Sequence to continue after, with `client.watchEvaluation`. */
  throughSequence: bigint;
}

/**
 * Follow a stream to its end and return its evaluation: neither a set that did not pass nor an evaluation that failed is
 * an error.
 */
export async function collectEvaluation(
  events: AsyncIterable<EvaluationEvent> & { throughSequence?: bigint },
): Promise<CollectedEvaluation> {
  const evaluation: CollectedEvaluation = {
    evaluationId: "",
    state: ExecutionState.UNSPECIFIED,
    verdict: Verdict.UNSPECIFIED,
    reason: "",
    totals: undefined,
    gates: [],
    error: undefined,
    throughSequence: 0n,
  };
  for await (const { evaluationId, sequence, payload } of events) {
    const state = evaluation.state || ExecutionState.RUNNING;
    Object.assign(evaluation, { evaluationId, throughSequence: sequence, state }, shown(payload));
  }
  evaluation.throughSequence = events.throughSequence ?? evaluation.throughSequence;
  return evaluation;
}

/** Return what an event of an evaluation changes. */
function shown({ case: kind, value }: EvaluationEvent["payload"]): Partial<CollectedEvaluation> {
  switch (kind) {
    case "evaluationTotaled":
      return { totals: value.totals, gates: value.gates, reason: value.reason };
    case "evaluationCompleted":
      return { state: ExecutionState.SUCCEEDED, verdict: value.verdict };
    case "evaluationFailed":
      return { state: ExecutionState.FAILED, error: value.error };
    case "evaluationCancelled":
      return { state: ExecutionState.CANCELLED, error: value.error, totals: value.totals };
    default:
      return {};
  }
}
