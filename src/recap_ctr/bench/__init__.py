"""Tables over arms and seeds, in the form of the paper's."""
