// Arguments and results of operators, as values of any type.
#pragma once
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace sim {

// The same value with other tensors; those that are not defined stay.
template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& it : value.toTensorList()) made.push_back(it.defined() ? function(it) : it);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (std::optional<at::Tensor> it : value.toOptionalTensorList())
      made.push_back(it && it->defined() ? std::optional<at::Tensor>(function(*it)) : it);
    return made;
  }
  return value;
}

template <class Function>
void each_tensor(const c10::IValue& value, Function function) {
  map_tensors(value, [&](const at::Tensor& it) {
    function(it);
    return it;
  });
}

using Values = std::vector<c10::IValue>;

bool takes_generator(const c10::Argument& argument);
bool returns_tensors(const c10::Argument& result);
bool writes(const c10::FunctionSchema& schema, size_t index, const Values& arguments);

// Operators that take indices or lengths from the host also on CUDA.
bool takes_host_tensors(const std::string& name);

// Operators whose kernel for the host has results of other shapes than those for accelerators.
bool has_shapes_of_its_own(const std::string& name);

// For each result the argument that it is (`is_write`), or that it is a view of; -1: it is new.
std::vector<int> arguments_of_results(const c10::FunctionSchema& schema, bool is_write);

}  // namespace sim
