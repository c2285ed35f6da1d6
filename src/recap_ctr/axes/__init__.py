"""The axes along which estimators are averaged: one file each."""
