// What the messages of training data look like: kinds, column types, field numbers.
//
// Four messages carry examples: TensorFlow's Example, and Monolith's Example, ExampleBatch and Instance.
// On our side all four are columns by name. A column is ragged: a record has any number of values in it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace monolith {

enum class ExampleKind : std::uint8_t { kTfExample, kExample, kInstance, kExampleBatch };

enum class ColumnType : std::uint8_t { kInt64, kFloat, kBytes };

inline constexpr std::string_view kLabelColumn = "label";
inline constexpr std::string_view kWeightColumn = "instance_weight";
inline constexpr std::string_view kSourceColumn = "data_source_key";
inline constexpr std::string_view kValueColumn = "value";  // the numbers that belong to an Instance's ids
inline constexpr std::string_view kLineIdPrefix = "line_id.";
inline constexpr std::string_view kSlotPrefix = "fc_slot_";

// Features that Monolith's own messages know under these names.
inline constexpr std::string_view kLabelFeature = "__LABEL__";
inline constexpr std::string_view kLineIdFeature = "__LINE_ID__";

// One field of LineId. Those that repeat keep all their values, of any other field the last value counts.
struct LineIdField {
  enum Form : std::uint8_t { kFixed, kInteger64, kInteger32, kTruth, kNumber, kText };
  std::uint32_t number;
  Form form;
  bool repeats;
  bool packed;  // as it is written; either way is read
  std::string_view column;
};

inline constexpr std::array<LineIdField, 14> kLineIdFields{{
    {2, LineIdField::kFixed, false, false, "line_id.uid"},
    {3, LineIdField::kInteger64, false, false, "line_id.req_time"},
    {4, LineIdField::kFixed, false, false, "line_id.item_id"},
    {6, LineIdField::kInteger32, true, true, "line_id.actions"},
    {19, LineIdField::kInteger64, false, false, "line_id.chnid"},
    {23, LineIdField::kInteger32, true, true, "line_id.pre_actions"},
    {27, LineIdField::kNumber, false, false, "line_id.sample_rate"},
    {39, LineIdField::kInteger32, true, false, "line_id.special_strategies"},
    {41, LineIdField::kText, false, false, "line_id.device_type"},
    {48, LineIdField::kText, false, false, "line_id.cid"},
    {49, LineIdField::kText, false, false, "line_id.user_id"},
    {87, LineIdField::kTruth, false, false, "line_id.is_draw"},
    {145, LineIdField::kInteger32, false, false, "line_id.rank"},
    {235, LineIdField::kText, false, false, "line_id.data_source_name"},
}};

inline constexpr ColumnType type_of(LineIdField::Form form) {
  return form == LineIdField::kNumber ? ColumnType::kFloat
         : form == LineIdField::kText ? ColumnType::kBytes
                                      : ColumnType::kInt64;
}

// Field numbers, by message.
namespace fields {

struct TfExample {
  static constexpr std::uint32_t kFeatures = 1;  // of Example
  static constexpr std::uint32_t kEntry = 1;     // of Features: a map's entries
  static constexpr std::uint32_t kBytes = 1, kFloats = 2, kInts = 3;
};
struct Entry {  // of a map, and NamedFeature up to here
  static constexpr std::uint32_t kName = 1, kFeature = 2;
};
struct Feature {
  static constexpr std::uint32_t kFidV1List = 1, kFidV2List = 2, kFloatList = 3, kDoubleList = 4,
                                 kInt64List = 5, kBytesList = 6, kFidV2Lists = 7, kFloatLists = 8,
                                 kDoubleLists = 9, kInt64Lists = 10, kBytesLists = 11, kInt64Value = 12,
                                 kFloatValue = 13, kDoubleValue = 14, kBytesValue = 15, kFidV1Lists = 16;
};
struct Example {
  static constexpr std::uint32_t kNamedFeature = 1, kLineId = 100, kLabel = 101, kWeight = 102, kSource = 103;
};
struct ExampleBatch {
  static constexpr std::uint32_t kList = 1, kBatchSize = 3, kSource = 100;
};
struct NamedFeatureList {
  static constexpr std::uint32_t kName = 1, kFeature = 2, kType = 3;
  static constexpr std::uint64_t kShared = 1;
};
struct Instance {
  static constexpr std::uint32_t kFid = 1, kValue = 2, kLabel = 3, kWeight = 4, kLineId = 5, kFeature = 9,
                                 kSource = 100;
};
struct InstanceFeature {
  static constexpr std::uint32_t kName = 1, kFid = 2, kFloat = 3, kInt64 = 4, kBytes = 5, kFidList = 6,
                                 kFloatList = 7, kInt64List = 8, kBytesList = 9;
};

}  // namespace fields
}  // namespace monolith
