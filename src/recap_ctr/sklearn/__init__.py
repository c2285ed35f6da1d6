"""CTRClassifier: from raw rows to calibrated scores under scikit-learn's conventions, by the code of the commands."""
