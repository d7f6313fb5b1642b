"""HTTP/2 for servers of few, long connections: frames, header compression, flow control, limits."""
