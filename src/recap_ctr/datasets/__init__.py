"""Public data sets, prepared by the protocols that papers compare models on."""
