"""TensorDicts as trees: the only subpackage that imports tensordict, and only when it is needed."""
