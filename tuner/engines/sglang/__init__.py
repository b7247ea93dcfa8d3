"""SGLang servers that somebody runs elsewhere, over SGLang's own HTTP protocol."""
