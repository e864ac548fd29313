"""The format on disk: WebDataset shards, their manifest and index. `docs/format.md` describes it byte by byte."""
