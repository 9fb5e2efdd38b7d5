"""A protoc plugin that lets buf call the code generators inside grpcio-tools.

buf hands a CodeGeneratorRequest to standard input; the argument says which of the
two generators answers it: `messages` or `services`.
"""

import sys
import tempfile
from pathlib import Path

from google.protobuf.compiler import plugin_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

OUTPUTS = {"messages": "--python_out", "services": "--grpc_python_out"}


def main() -> None:
    """Answer the request on standard input with the generated files."""
    output_flag = OUTPUTS[sys.argv[1]]
    request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
    response = plugin_pb2.CodeGeneratorResponse(
        supported_features=plugin_pb2.CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL
    )
    wanted = list(request.file_to_generate)
    if output_flag == OUTPUTS["services"]:
        # grpc_tools writes an import-only stub for files without a service; nobody needs it.
        wanted = [f.name for f in request.proto_file if f.name in wanted and f.service]
    with tempfile.TemporaryDirectory() as folder:
        descriptors = Path(folder) / "descriptors.bin"
        descriptors.write_bytes(FileDescriptorSet(file=request.proto_file).SerializeToString())
        out = Path(folder) / "out"
        out.mkdir()
        if wanted:
            command = ["protoc", f"--descriptor_set_in={descriptors}", f"{output_flag}={out}"]
            if protoc.main([*command, *wanted]) != 0:
                response.error = f"grpc_tools could not generate {sys.argv[1]}"
        for path in sorted(out.rglob("*.py")):
            response.file.add(name=path.relative_to(out).as_posix(), content=path.read_text())
    sys.stdout.buffer.write(response.SerializeToString())


if __name__ == "__main__":
    main()
