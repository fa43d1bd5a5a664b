package main

import (
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// methodOf returns the method of a name such as "AgentService.GetRun".
func methodOf(name string) (protoreflect.MethodDescriptor, error) {
	service, method, _ := strings.Cut(name, ".")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("bough.v1." + service))
	if err != nil {
		return nil, misunderstood{err}
	}
	described, isService := found.(protoreflect.ServiceDescriptor)
	if !isService {
		return nil, misunderstood{fmt.Errorf("%s is no service", service)}
	}
	wanted := described.Methods().ByName(protoreflect.Name(method))
	if wanted == nil {
		return nil, misunderstood{fmt.Errorf("%s has no method %q", service, method)}
	}
	return wanted, nil
}

func messageOf(described protoreflect.MessageDescriptor) proto.Message {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(described.FullName())
	if err != nil {
		panic(err) // every message of the schema is registered
	}
	return kind.New().Interface()
}

func streamDesc(method protoreflect.MethodDescriptor) grpc.StreamDesc {
	return grpc.StreamDesc{
		StreamName: string(method.Name()), ClientStreams: method.IsStreamingClient(), ServerStreams: method.IsStreamingServer(),
	}
}
