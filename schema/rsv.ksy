meta:
  id: rsv
  title: RSV 1.0, quantized weight matrices
  file-extension: rsv
  license: Apache-2.0
  ks-version: 0.9
  endian: le
doc: |
  The parts of an RSV file that do not need its header: the prologue, the header's bytes, and the region of the
  blobs. Where each blob lies in that region follows from the header, a JSON text, by the rules of SPEC.md
  section 4, which this language cannot express.

  Checked here: magic, major version, flags, the limit of the header, and that prologue, header and blobs fill the
  file (SPEC.md section 2, without the digest). Everything else is left to a reader.
doc-ref: SPEC.md
seq:
  - id: prologue
    type: prologue
  - id: header
    size: prologue.header_nbytes
    type: str
    encoding: UTF-8
    doc: A JSON text, valid against rsv-header-1.0.schema.json.
  - id: header_padding
    type: zero
    repeat: expr
    repeat-expr: (64 - prologue.header_nbytes % 64) % 64
    doc: Zero bytes up to a multiple of 64.
  - id: blobs
    size: prologue.file_nbytes - blobs_offset
    doc: |
      Blobs in walk order (SPEC.md, RSV-501), each starting at a multiple of 64 from the start of the file, with zero
      bytes between them and up to the end, which is a multiple of 16384.
  - id: trailing
    type: zero
    repeat: eos
    valid:
      expr: false
    doc: No byte may follow the length that the prologue gives.
instances:
  blobs_offset:
    value: 64 + prologue.header_nbytes + (64 - prologue.header_nbytes % 64) % 64
    doc: From the start of the file.
types:
  prologue:
    seq:
      - id: magic
        contents: [0x89, 'RSV', 0x0d, 0x0a, 0x1a, 0x0a]
      - id: version_major
        type: u2
        valid: 1
      - id: version_minor
        type: u2
        doc: Of any value; minor versions change the meaning of nothing.
      - id: flags
        type: u4
        valid: 0
      - id: header_nbytes
        type: u8
        valid:
          max: 67108864
        doc: Length of the header, without padding.
      - id: file_nbytes
        type: u8
        doc: Length of the file.
      - id: header_sha256
        size: 32
        doc: SHA-256 of bytes 0 to 31 of the file, then the header (left to a reader).
  zero:
    seq:
      - id: value
        type: u1
        valid: 0
