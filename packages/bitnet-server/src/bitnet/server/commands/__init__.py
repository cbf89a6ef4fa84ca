"""Commands of ``bitnet`` that this package adds."""
