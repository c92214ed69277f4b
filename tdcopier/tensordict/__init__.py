"""TensorDicts as trees: the only part of the package that imports tensordict, when it is needed."""
