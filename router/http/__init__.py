"""HTTP/1.1 as bytes under deadlines, towards clients and towards engines."""
