"""The protobuf messages of the Tinker API (package tinker_public, proto3), from a description in Python.

Always holds: the numbers and types are those of SDK 0.24, 0.36 and 0.38, as far as the server reads or writes them. The
messages are in a pool of their own, so that the SDK may be imported into the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "tinker_public"
#: number name type: `type*` repeated, `type?` optional, `type|group` one of a group, `>type` a map from string. Enums are
#: int32, which has the same bytes.
_MESSAGES = {
    "SampleResponse": """1 sequences SampledSequence*
        2 prompt_logprobs bytes?
        3 topk_prompt_logprobs TopkLogprobs?
        4 prompt_cache_hit_tokens int32""",
    "SampledSequence": """1 stop_reason int32
        2 tokens bytes
        3 logprobs bytes?""",
    "TopkLogprobs": """1 token_ids bytes
        2 logprobs bytes
        3 k uint32
        4 length uint32""",
    "SparseCsr": """1 values bytes
        2 crow_indices bytes
        3 col_indices bytes""",
    "Tensor": """1 dense bytes|encoding
        2 sparse_csr SparseCsr|encoding
        3 dtype int32
        4 shape int64*""",
    "BatchedTensor": """1 data bytes
        2 offsets bytes
        3 dtype int32
        4 trailing_shape int64*""",
    "ArrayRecord": """1 type_tag string
        2 fields >BatchedTensor
        3 num_datums int64""",
    "ForwardBackwardOutput": """1 loss_fn_output_type string
        2 loss_fn_outputs ArrayRecord*
        3 metrics >double""",
    "ForwardBackwardRequest": """1 model_id string
        2 seq_id int32
        3 data Datum*
        4 loss_fn string
        5 loss_fn_config >double
        6 forward_only bool
        7 loss_fn_config_v2 >LossConfigValue""",
    "LossConfigValue": """1 number double|value
        2 text string|value""",
    "Datum": """1 model_input Chunk*
        2 loss_fn_inputs >Tensor""",
    "Chunk": """1 encoded_text EncodedTextChunk|chunk
        2 image OtherChunk|chunk
        3 dmel OtherChunk|chunk""",
    "EncodedTextChunk": "1 tokens bytes",
    "OtherChunk": "",
}
_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "int32", "int64", "string", "uint32")
}


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, described in _MESSAGES.items():
        message = file.message_type.add(name=name)
        optional = []
        for line in filter(None, map(str.strip, described.splitlines())):
            number, field_name, kind = line.split()
            field = message.field.add(name=field_name, number=int(number))
            if _set_type(message, field, kind):
                optional.append(field)
        # Their groups of one come after all others.
        for field in optional:
            field.proto3_optional = True
            _into_group(message, field, f"_{field.name}")
    return file


def _set_type(message: DescriptorProto, field: FieldDescriptorProto, kind: str) -> bool:
    """As _MESSAGES writes it; whether it is optional."""
    kind, _, group = kind.partition("|")
    bare = kind.strip("*?>")
    repeated = kind != bare and not kind.endswith("?")
    field.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
    if kind.startswith(">"):
        bare = f"{message.name}.{_add_entry(message, field.name, bare)}"
    if bare in _SCALARS:
        field.type = _SCALARS[bare]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{bare}"
    if group:
        _into_group(message, field, group)
    return kind.endswith("?")


def _add_entry(message: DescriptorProto, field_name: str, kind: str) -> str:
    name = "".join(part.capitalize() for part in field_name.split("_")) + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    _set_type(entry, entry.field.add(name="key", number=1), "string")
    _set_type(entry, entry.field.add(name="value", number=2), kind)
    return name


def _into_group(message: DescriptorProto, field: FieldDescriptorProto, group: str) -> None:
    groups = [declared.name for declared in message.oneof_decl]
    if group not in groups:
        message.oneof_decl.add(name=group)
        groups.append(group)
    field.oneof_index = groups.index(group)


_pool = DescriptorPool()
_pool.Add(_file())


def _message(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


SampleResponse = _message("SampleResponse")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
ForwardBackwardRequest = _message("ForwardBackwardRequest")
DatumMessage = _message("Datum")
EntryMessage = DatumMessage.DESCRIPTOR.fields_by_name["loss_fn_inputs"].message_type
TensorMessage = EntryMessage.fields_by_name["value"].message_type
