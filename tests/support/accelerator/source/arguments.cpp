#include "arguments.h"

#include <ATen/core/jit_type.h>

namespace sim {

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool returns_tensors(const c10::Argument& result) {
  auto type = result.type();
  if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
  return type->kind() == c10::TypeKind::TensorType;
}

bool writes(const c10::FunctionSchema& schema, size_t index, const Values& arguments) {
  auto* alias = schema.arguments()[index].alias_info();
  if (alias && alias->isWrite()) return true;
  // Its schema does not say that it updates running_mean and running_var.
  bool is_statistic = (index == 3 || index == 4) && schema.operator_name().name == "aten::native_batch_norm";
  return is_statistic && arguments[5].toBool();
}

bool takes_host_tensors(const std::string& name) {
  for (auto* begin : {"aten::index", "aten::_index_put", "aten::_unsafe_index", "aten::_pack_padded", "aten::ctc_loss",
                      "aten::_ctc_loss"})
    if (name.rfind(begin, 0) == 0) return true;
  return false;
}

bool has_shapes_of_its_own(const std::string& name) { return name.rfind("aten::_embedding_bag", 0) == 0; }

std::vector<int> arguments_of_results(const c10::FunctionSchema& schema, bool is_write) {
  std::vector<int> found(schema.returns().size(), -1);
  for (size_t i = 0; i < found.size(); ++i) {
    auto* result = schema.returns()[i].alias_info();
    if (!result || result->beforeSets().empty() || result->isWrite() != is_write) continue;
    for (size_t j = 0; j < schema.arguments().size(); ++j) {
      auto* argument = schema.arguments()[j].alias_info();
      if (argument && argument->beforeSets() == result->beforeSets()) found[i] = j;
    }
  }
  return found;
}

}  // namespace sim
