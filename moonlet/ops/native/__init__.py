"""C++ kernels beside the torch forms of `ops/`: built at first use, loaded with ctypes, tested against definitions."""
