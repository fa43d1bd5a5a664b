// Package bough is the client of Bough, a server that runs teams of LLM agents and keeps the tree of who called whom.
//
// A [Client] starts runs and follows them. [Client.Run], [Client.Watch], [Client.Resume] and [Client.Fork] return a stream of
// events, and so do [Client.Evaluate] and [Client.WatchEvaluation]:
//
//	client, err := bough.NewClient("127.0.0.1:50051")
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//	stream := client.Run(ctx, &boughv1.RunRequest{Agent: "lead", Input: bough.UserMessage("Why do leaves turn red?")})
//	for event, err := range stream.Events() {
//		if err != nil {
//			return err
//		}
//		fmt.Print(event.GetLlmOutputTextDelta().GetText())
//	}
//
// A [Stream] survives dropped connections and restarted servers: each event comes once, in order. [Collect] reads a stream to its
// end and returns what became of the run, [CollectEvaluation] what became of an evaluation, and [Client.Tree] returns the agents of a
// run as a tree.
//
// Messages and enums are in package [boughv1], generated from the schema, whose comments say what a client may rely on. Skip
// payloads and enum values that you do not know: a newer server may send them. The services without a method of Client are
// reached by the generated stubs that [Client.Agents], [Client.Evals], [Client.Sessions] and [Client.Catalog] return; their
// errors are of type [*Error] too. Deadlines and cancellation are those of the context.
//
// Package boughtest has a server for tests that needs no Bough.
package bough
