"""The version of this implementation, which is no version of the format."""

VERSION = "0.1.0"
