"""One advantage for each completion: an estimator a file, with its segment form and its class."""
