"""A raw table becomes shards of encoded rows."""
