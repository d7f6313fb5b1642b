"""The bytes between gateway and picker: gRPC, Protocol Buffers, and the messages of ext_proc."""
