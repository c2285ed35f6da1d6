"""The paper's tables and figures, made from runs of several arms and seeds."""
