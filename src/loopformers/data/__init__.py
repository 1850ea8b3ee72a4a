"""Text in, windows of tokens out.

`corpora` reads documents, `splits` divides them, `tokenizer` holds the bundled vocabulary, `packing` makes windows of
token ids, `statistics` the levels that a loss is judged against. Import the modules by name: this one loads nothing.
"""
