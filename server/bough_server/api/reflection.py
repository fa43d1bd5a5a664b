"""Reflection, by which tools list the services and read their schema: every symbol, the schema's with its comments.

The servicer of `grpcio-reflection` looks symbols up in a pool of descriptors, which in Python finds no method and no
enum value and has no comments, and it serves v1alpha only. So the answers are taken from the files themselves.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bough_server.api.health import SERVICES
from bough_server.schema_rules import schema_files

_V1ALPHA: Final = "grpc.reflection.v1alpha"
_V1: Final = "grpc.reflection.v1"

REFLECTION_SERVICES: Final[Sequence[str]] = (f"{_V1}.ServerReflection", f"{_V1ALPHA}.ServerReflection")
"""The services of reflection; their messages are the same on the wire."""


class SchemaFiles:
    """Files of a schema, and which of them define a symbol or an extension.

    Every lookup raises KeyError with what there is not.
    """

    def __init__(self, files: Iterable[FileDescriptorProto]) -> None:
        self._files = {file.name: file for file in files}
        self._symbols = {symbol: file for file in self._files.values() for symbol in _symbols_of_file(file)}
        self._extensions = {key: file for file in self._files.values() for key in _extensions_of(file)}

    def by_name(self, name: str) -> FileDescriptorProto:
        """Return a file by its name."""
        return _require_file(self._files.get(name), f"file {name!r}")

    def of_symbol(self, symbol: str) -> FileDescriptorProto:
        """Return the file that defines a symbol."""
        return _require_file(self._symbols.get(symbol), f"symbol {symbol!r}")

    def of_extension(self, type_name: str, number: int) -> FileDescriptorProto:
        """Return the file that defines an extension."""
        return _require_file(self._extensions.get((type_name, number)), f"extension {number} of {type_name!r}")

    def extension_numbers(self, type_name: str) -> Sequence[int]:
        """Return the numbers of all extensions of a message type."""
        self.of_symbol(type_name)
        return sorted(number for extended, number in self._extensions if extended == type_name)

    def with_imports(self, file: FileDescriptorProto) -> Sequence[FileDescriptorProto]:
        """Return a file, followed by all that it imports."""
        found, pending = {file.name: file}, [file]
        while pending:
            for name in pending.pop().dependency:
                if name not in found:
                    found[name] = self.by_name(name)
                    pending.append(found[name])
        return list(found.values())


def add_reflection(server: aio.Server) -> None:
    """Add reflection under v1 and v1alpha."""
    reflection = _Reflection((*SERVICES, health.SERVICE_NAME, *REFLECTION_SERVICES))
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.responses,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": handler})
            for service in REFLECTION_SERVICES
        ]
    )


class _Reflection:
    """Answers from the schema."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted(services)

    async def responses(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], _context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        """Answer each request of a stream."""
        async for request in requests:
            response = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
            try:
                self._answer(request, response)
            except KeyError as error:
                _fail(response, grpc.StatusCode.NOT_FOUND, f"There is no {error.args[0]} in this server's schema.")
            yield response

    def _answer(
        self, request: reflection_pb2.ServerReflectionRequest, response: reflection_pb2.ServerReflectionResponse
    ) -> None:
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _add_files(response, collect_served_files().by_name(request.file_by_filename))
            case "file_containing_symbol":
                _add_files(response, collect_served_files().of_symbol(request.file_containing_symbol))
            case "file_containing_extension":
                wanted = request.file_containing_extension
                _add_files(
                    response, collect_served_files().of_extension(wanted.containing_type, wanted.extension_number)
                )
            case "all_extension_numbers_of_type":
                type_name = request.all_extension_numbers_of_type
                numbers = response.all_extension_numbers_response
                numbers.extension_number.extend(collect_served_files().extension_numbers(type_name))
                numbers.base_type_name = type_name
            case _:
                _fail(response, grpc.StatusCode.INVALID_ARGUMENT, "The request asks for nothing.")


@cache
def collect_served_files() -> SchemaFiles:
    """Return the files that reflection serves: the schema, health, reflection itself, and the details of errors."""
    files = {file.name: file for file in schema_files()}
    for module in (health_pb2, reflection_pb2, error_details_pb2, status_pb2):
        for file in _copy_with_imports(module.DESCRIPTOR):
            files.setdefault(file.name, file)
    return SchemaFiles([*files.values(), _copy_as_v1(files[reflection_pb2.DESCRIPTOR.name])])


def _copy_with_imports(file: FileDescriptor) -> Iterator[FileDescriptorProto]:
    for imported in file.dependencies:
        yield from _copy_with_imports(imported)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)
    yield copy


def _copy_as_v1(alpha: FileDescriptorProto) -> FileDescriptorProto:
    """Return the file of v1 of reflection, of which only the package is different."""
    file = FileDescriptorProto()
    file.CopyFrom(alpha)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = _V1
    for message in file.message_type:
        for field in (each for each in message.field if each.type_name):
            field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_V1ALPHA, _V1)
        method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    return file


def _require_file(file: FileDescriptorProto | None, wanted: str) -> FileDescriptorProto:
    if file is None:
        raise KeyError(wanted)
    return file


def _add_files(response: reflection_pb2.ServerReflectionResponse, file: FileDescriptorProto) -> None:
    response.file_descriptor_response.file_descriptor_proto.extend(
        one.SerializeToString() for one in collect_served_files().with_imports(file)
    )


def _fail(response: reflection_pb2.ServerReflectionResponse, code: grpc.StatusCode, message: str) -> None:
    response.error_response.error_code, response.error_response.error_message = code.value[0], message


def _symbols_of_file(file: FileDescriptorProto) -> Iterator[str]:
    """Return the full names of all that a file defines."""
    package = f"{file.package}." if file.package else ""
    yield from (f"{package}{extension.name}" for extension in file.extension)
    for message in file.message_type:
        yield from _symbols_of_message(message, package)
    for enum in file.enum_type:
        yield from _symbols_of_enum(enum, package)
    for service in file.service:
        yield f"{package}{service.name}"
        yield from (f"{package}{service.name}.{method.name}" for method in service.method)


def _symbols_of_message(message: DescriptorProto, prefix: str) -> Iterator[str]:
    inner = f"{prefix}{message.name}."
    yield inner[:-1]
    yield from (f"{inner}{field.name}" for field in (*message.field, *message.extension))
    yield from (f"{inner}{oneof.name}" for oneof in message.oneof_decl)
    for nested in message.nested_type:
        yield from _symbols_of_message(nested, inner)
    for enum in message.enum_type:
        yield from _symbols_of_enum(enum, inner)


def _symbols_of_enum(enum: EnumDescriptorProto, prefix: str) -> Iterator[str]:
    """Return an enum and its values, whose full names are beside the enum; people also write them below it."""
    yield f"{prefix}{enum.name}"
    for value in enum.value:
        yield from (f"{prefix}{value.name}", f"{prefix}{enum.name}.{value.name}")


def _extensions_of(scope: FileDescriptorProto | DescriptorProto) -> Iterator[tuple[str, int]]:
    """Return the extended type and the number of each extension that a file, or a message in it, defines."""
    yield from ((extension.extendee.removeprefix("."), extension.number) for extension in scope.extension)
    nested = scope.nested_type if isinstance(scope, DescriptorProto) else scope.message_type
    for message in nested:
        yield from _extensions_of(message)
