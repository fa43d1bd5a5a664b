package bough

import (
	"encoding/json"
	"strings"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// UserMessage returns a message of the user: a text, and further parts such as files.
func UserMessage(text string, parts ...*boughv1.Part) *boughv1.Message {
	all := []*boughv1.Part{{Content: &boughv1.Part_Text{Text: text}}}
	return &boughv1.Message{Role: boughv1.Role_ROLE_USER, Parts: append(all, parts...)}
}

// FilePart returns a part of a message with the bytes of a file, of a media type such as "image/png".
func FilePart(data []byte, mediaType string) *boughv1.Part {
	size := int64(len(data))
	blob := &boughv1.Blob{Source: &boughv1.Blob_Data{Data: data}, MediaType: mediaType, SizeBytes: &size}
	return &boughv1.Part{Content: &boughv1.Part_Blob{Blob: blob}}
}

// MessageText returns the text of a message: its parts of text joined, and its parts of JSON among them as JSON text. Files,
// reasoning, calls and results are left out.
func MessageText(message *boughv1.Message) string {
	var text strings.Builder
	for _, part := range message.GetParts() {
		text.WriteString(part.GetText())
		text.WriteString(part.GetDataJson())
	}
	return text.String()
}

// Approve allows a tool call. The note is for the record.
func Approve(request *boughv1.InputRequest, note string) *boughv1.InputAnswer {
	return approval(request, &boughv1.ApprovalDecision{Approved: true, Note: note})
}

// ApproveWith allows a tool call with other arguments, which are a JSON object.
func ApproveWith(request *boughv1.InputRequest, argumentsJSON, note string) *boughv1.InputAnswer {
	return approval(request, &boughv1.ApprovalDecision{Approved: true, ArgumentsJson: argumentsJSON, Note: note})
}

// Refuse forbids a tool call. The model reads the note.
func Refuse(request *boughv1.InputRequest, note string) *boughv1.InputAnswer {
	return approval(request, &boughv1.ApprovalDecision{Note: note})
}

func approval(request *boughv1.InputRequest, decision *boughv1.ApprovalDecision) *boughv1.InputAnswer {
	return &boughv1.InputAnswer{
		InputId: request.GetInputId(), Answer: &boughv1.InputAnswer_Approval{Approval: decision},
	}
}

// Reply answers a question with a value that [json.Marshal] accepts.
func Reply(request *boughv1.InputRequest, value any) (*boughv1.InputAnswer, error) {
	encoded, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	answer := &boughv1.InputAnswer_ValueJson{ValueJson: string(encoded)}
	return &boughv1.InputAnswer{InputId: request.GetInputId(), Answer: answer}, nil
}

// ToolText answers with what a tool returned that the client ran.
func ToolText(request *boughv1.InputRequest, text string) *boughv1.InputAnswer {
	return outcome(request, &boughv1.ToolOutcome{Parts: UserMessage(text).GetParts()})
}

// ToolFailed answers that a tool failed that the client ran. The model reads the message, which must contain no secret.
func ToolFailed(request *boughv1.InputRequest, message string) *boughv1.InputAnswer {
	return outcome(request, &boughv1.ToolOutcome{Failure: &boughv1.ToolFailure{Message: message}})
}

func outcome(request *boughv1.InputRequest, outcome *boughv1.ToolOutcome) *boughv1.InputAnswer {
	return &boughv1.InputAnswer{
		InputId: request.GetInputId(), Answer: &boughv1.InputAnswer_ToolOutcome{ToolOutcome: outcome},
	}
}
