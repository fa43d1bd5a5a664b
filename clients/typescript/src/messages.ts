import { create, type MessageInitShape } from "@bufbuild/protobuf";
import {
  type InputAnswer,
  InputAnswerSchema,
  type InputRequest,
  type Message,
  MessageSchema,
  Role,
  ToolOutcomeSchema,
} from "./bough/v1/index.js";

/** A user's message: its text, or the whole message. */
export type UserInput = string | MessageInitShape<typeof MessageSchema>;

/** Return a user's message. */
export function userMessage(input: UserInput): Message {
  return typeof input === "string"
    ? create(MessageSchema, { role: Role.USER, parts: [{ content: { case: "text", value: input } }] })
    : create(MessageSchema, input);
}

/**
 * Return the text of a message: its parts of text joined, and its parts of JSON among them as JSON text.
 *
 * Files, reasoning, calls and results are left out.
 */
export function textOf(message: Message | undefined): string {
  const texts = (message?.parts ?? []).map(({ content }) =>
    content.case === "text" || content.case === "dataJson" ? content.value : "",
  );
  return texts.join("");
}

/** Approve a tool call; `argumentsJson` replaces its arguments, the note is for the record. */
export function approve(
  request: InputRequest | string,
  { argumentsJson = "", note = "" }: { argumentsJson?: string; note?: string } = {},
): InputAnswer {
  return answer(request, { case: "approval", value: { approved: true, argumentsJson, note } });
}

/** Refuse a tool call. The model sees the refusal and the note. */
export function refuse(request: InputRequest | string, note = ""): InputAnswer {
  return answer(request, { case: "approval", value: { approved: false, note } });
}

/** Answer with the outcome of a tool that the client ran: its text, or the error of a tool that failed. */
export function toolOutcome(request: InputRequest | string, outcome: string | Error): InputAnswer {
  const value: MessageInitShape<typeof ToolOutcomeSchema> =
    typeof outcome === "string"
      ? { parts: [{ content: { case: "text", value: outcome } }] }
      : { failure: { message: outcome.message || outcome.name } };
  return answer(request, { case: "toolOutcome", value });
}

/** Answer a question with a value that JSON can represent. */
export function reply(request: InputRequest | string, value: unknown): InputAnswer {
  const json = JSON.stringify(value);
  if (json === undefined) {
    throw new TypeError("The answer to a question must be a value that JSON can represent.");
  }
  return answer(request, { case: "valueJson", value: json });
}

function answer(
  request: InputRequest | string,
  given: NonNullable<MessageInitShape<typeof InputAnswerSchema>["answer"]>,
): InputAnswer {
  return create(InputAnswerSchema, { inputId: typeof request === "string" ? request : request.inputId, answer: given });
}
