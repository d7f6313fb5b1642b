"""Several worker processes behind one port: started, kept alive, and seen from outside as one router."""
