"""The axes along which estimators are averaged."""
