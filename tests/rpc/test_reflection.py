"""Reflection, as grpcurl, buf and other tools use it: every symbol of the schema, under both names of the service."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import aio
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from bough_server.api.health import SERVICES
from bough_server.api.reflection import add_reflection
from bough_server.interceptors.chain import interceptors
from bough_server.schema_rules import schema, schema_files
from tests.rpc.interceptor_server import outcome

REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.fixture(params=REFLECTIONS)
def service(request: pytest.FixtureRequest) -> str:
    """The name under which reflection is called."""
    assert isinstance(request.param, str)
    return request.param


@asynccontextmanager
async def _reflecting(*, reflects: bool = True) -> AsyncIterator[aio.Channel]:
    server = aio.server(interceptors=interceptors(None))
    if reflects:
        add_reflection(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(grace=None)


async def _answers(service: str, *requests: ServerReflectionRequest) -> list[ServerReflectionResponse]:
    async with _reflecting() as channel:
        call = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )(iter(requests))
        return [response async for response in call]


async def _answer(service: str, request: ServerReflectionRequest) -> ServerReflectionResponse:
    (response,) = await _answers(service, request)
    assert response.original_request == request
    return response


def _files(response: ServerReflectionResponse) -> list[FileDescriptorProto]:
    assert not response.HasField("error_response"), response.error_response
    return [FileDescriptorProto.FromString(one) for one in response.file_descriptor_response.file_descriptor_proto]


def _first_file(response: ServerReflectionResponse) -> FileDescriptorProto:
    return FileDescriptorProto.FromString(response.file_descriptor_response.file_descriptor_proto[0])


def _symbols() -> Iterator[tuple[str, str]]:
    """Every symbol of bough.v1 and the name of its file, by the descriptors."""
    for proto in schema_files():
        file = schema().FindFileByName(proto.name)
        if file.package != "bough.v1":
            continue
        names = [extension.full_name for extension in file.extensions_by_name.values()]
        for message in file.message_types_by_name.values():
            names += _of_message(message)
        for enum in file.enum_types_by_name.values():
            names += _of_enum(enum)
        for service in file.services_by_name.values():
            names += [service.full_name, *(method.full_name for method in service.methods)]
        yield from ((name, file.name) for name in names)


def _of_message(message: Descriptor) -> Sequence[str]:
    names = [message.full_name, *(each.full_name for each in (*message.fields, *message.oneofs, *message.extensions))]
    for nested in message.nested_types:
        names += _of_message(nested)
    for enum in message.enum_types:
        names += _of_enum(enum)
    return names


def _of_enum(enum: EnumDescriptor) -> Sequence[str]:
    scope = enum.full_name.rpartition(".")[0]
    values = [value.name for value in enum.values]
    return [enum.full_name, *(f"{scope}.{name}" for name in values), *(f"{enum.full_name}.{name}" for name in values)]


async def test_every_symbol_of_the_schema_is_found(service: str) -> None:
    symbols = dict(_symbols())
    requests = [ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
    responses = await _answers(service, *requests)
    found = {response.original_request.file_containing_symbol: _first_file(response).name for response in responses}
    assert found == symbols
    assert {"bough.v1.AgentService.Run", "bough.v1.EXECUTION_STATE_RUNNING", "bough.v1.AgentEvent.payload"} <= {*found}


async def test_the_services_are_listed(service: str) -> None:
    response = await _answer(service, ServerReflectionRequest(list_services="", host="bough.test"))
    names = [each.name for each in response.list_services_response.service]
    assert names == sorted((*SERVICES, "grpc.health.v1.Health", *REFLECTIONS))
    assert response.valid_host == "bough.test"


@pytest.mark.parametrize("name", [*SERVICES, "grpc.health.v1.Health", *REFLECTIONS, "google.rpc.ErrorInfo"])
async def test_what_is_listed_comes_with_all_that_it_imports(service: str, name: str) -> None:
    response = await _answer(service, ServerReflectionRequest(file_containing_symbol=name))
    files = {file.name: file for file in _files(response)}
    pool = DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptorProto) -> None:
        for imported in file.dependency:
            add(files[imported])
        if file.name not in added:
            pool.AddSerializedFile(file.SerializeToString())
            added.add(file.name)

    add(_files(response)[0])
    assert pool.FindFileContainingSymbol(name).name == _files(response)[0].name


async def test_comments_and_rules_come_along(service: str) -> None:
    response = await _answer(service, ServerReflectionRequest(file_containing_symbol="bough.v1.AgentService.Run"))
    file = _files(response)[0]
    comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
    at_service, at_method = (6, 0), (6, 0, 2, 0)
    assert file.service[0].method[0].name == "Run"
    assert comments[at_service].startswith(" Runs agents, and streams what happens in their runs.")
    assert comments[at_method].startswith(" Starts a run and follows it to its end")
    assert "buf/validate/validate.proto" in file.dependency


async def test_a_file_is_found_by_its_name(service: str) -> None:
    by_name = await _answer(service, ServerReflectionRequest(file_by_filename="bough/v1/run.proto"))
    by_symbol = await _answer(service, ServerReflectionRequest(file_containing_symbol="bough.v1.Run"))
    assert _files(by_name) == _files(by_symbol)


async def test_extensions_are_found_by_number(service: str) -> None:
    options = "google.protobuf.FieldOptions"
    listed = await _answer(service, ServerReflectionRequest(all_extension_numbers_of_type=options))
    answer = listed.all_extension_numbers_response
    event_options = schema().FindExtensionByName("bough.v1.event_options").number
    assert answer.base_type_name == options
    assert event_options in answer.extension_number
    request = ServerReflectionRequest()
    request.file_containing_extension.containing_type = options
    request.file_containing_extension.extension_number = event_options
    assert _files(await _answer(service, request))[0].name == "bough/v1/options.proto"
    none = await _answer(service, ServerReflectionRequest(all_extension_numbers_of_type="bough.v1.Run"))
    assert list(none.all_extension_numbers_response.extension_number) == []


async def test_what_there_is_not_is_said_and_the_stream_continues(service: str) -> None:
    extension = ServerReflectionRequest()
    extension.file_containing_extension.containing_type = "bough.v1.Run"
    extension.file_containing_extension.extension_number = 7
    *failed, listed = await _answers(
        service,
        ServerReflectionRequest(file_containing_symbol="bough.v1.Nothing"),
        ServerReflectionRequest(file_by_filename="bough/v1/nothing.proto"),
        ServerReflectionRequest(all_extension_numbers_of_type="bough.v1.Nothing"),
        extension,
        ServerReflectionRequest(),
        ServerReflectionRequest(list_services=""),
    )
    assert [(each.error_response.error_code, each.error_response.error_message) for each in failed] == [
        (grpc.StatusCode.NOT_FOUND.value[0], "There is no symbol 'bough.v1.Nothing' in this server's schema."),
        (grpc.StatusCode.NOT_FOUND.value[0], "There is no file 'bough/v1/nothing.proto' in this server's schema."),
        (grpc.StatusCode.NOT_FOUND.value[0], "There is no symbol 'bough.v1.Nothing' in this server's schema."),
        (grpc.StatusCode.NOT_FOUND.value[0], "There is no extension 7 of 'bough.v1.Run' in this server's schema."),
        (grpc.StatusCode.INVALID_ARGUMENT.value[0], "The request asks for nothing."),
    ]
    assert listed.HasField("list_services_response")


async def test_reflection_can_be_left_out() -> None:
    async with _reflecting(reflects=False) as channel:
        call = ServerReflectionStub(channel).ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]))
        received, error = await outcome(call)
    assert received == []
    assert error is not None
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
