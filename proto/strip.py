"""Write a descriptor set twice: whole, and without the validation rules and their import, which stubs can do without.

Both keep the comments; the positions in the source that have none are dropped.
Usage: python proto/strip.py SET WHOLE STRIPPED
"""

import sys
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

RULES = "buf/validate/"


def strip(message: Message) -> None:
    """Remove from a descriptor, and from all that it holds, the options that the files of the rules define."""
    for field, value in message.ListFields():
        if field.is_extension and field.file.name.startswith(RULES):
            message.ClearExtension(field)
        elif field.message_type is not None and not field.is_extension:
            for part in value if field.is_repeated else [value]:
                strip(part)
            if field.name == "options" and not value.ByteSize():
                message.ClearField("options")


def main(source: Path, whole: Path, stripped: Path) -> None:
    """Read `source`, write the other two; the same input makes the same bytes."""
    files = descriptor_pb2.FileDescriptorSet.FromString(source.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    # A class of this pool knows the options of this pool, which elsewhere are unknown fields.
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("google.protobuf.FileDescriptorSet"))()
    made.ParseFromString(source.read_bytes())
    for file in made.file:
        commented = [place for place in file.source_code_info.location if place.leading_comments]
        # No source_code_info at all if it would be empty: generators that read it expect every element in it.
        file.ClearField("source_code_info")
        if file.package.startswith("bough."):
            file.source_code_info.location.extend(commented)
    whole.write_bytes(made.SerializeToString(deterministic=True))
    kept = [file for file in made.file if not file.name.startswith(RULES)]
    for file in kept:
        strip(file)
        file.dependency[:] = [name for name in file.dependency if not name.startswith(RULES)]
    stripped.write_bytes(type(made)(file=kept).SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
