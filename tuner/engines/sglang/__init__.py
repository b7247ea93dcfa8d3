"""SGLang servers that somebody else runs, over SGLang's own HTTP protocol."""
