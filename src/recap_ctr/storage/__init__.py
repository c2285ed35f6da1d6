"""Files that are whole or absent: atomic writes, claims and locks, hashes and arrays."""
