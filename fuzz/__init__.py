"""Fuzzing of the three readers; conformance/FUZZING.md says what was run and found.

- jsontext: JSON trees that may hold duplicate names, odd tokens and blobs
- signing: files from trees, digests and sizes put right
- mutate: damage with structure
- corpus: seeds from the conformance vectors
- exercise: all that may be asked of a file
- fuzz_python: the coverage-guided target of rsv_format; that of the C reader is conformance/readers/c/fuzz.c
- adapters: the other readers;  agree: equal within bounds;  differential: the same files through the three readers
- bitflips: every bit and every truncation of a file
- memory: what a hostile file costs to open
"""
