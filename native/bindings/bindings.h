// Each file in this folder binds one room of the core; module.cc lists them.
#pragma once

#include <nanobind/nanobind.h>

#include "gil_released.h"

namespace monolith {

void bind_checksum(nanobind::module_& m);
void bind_entry_dump(nanobind::module_& m);
void bind_admission(nanobind::module_& m);
void bind_touched_keys(nanobind::module_& m);
void bind_workers(nanobind::module_& m);
void bind_raw_rows(nanobind::module_& m);
void bind_table(nanobind::module_& m);
void bind_table_group(nanobind::module_& m);
void bind_tiered_table(nanobind::module_& m);
void bind_frozen(nanobind::module_& m);
void bind_layouts(nanobind::module_& m);
void bind_routes(nanobind::module_& m);
void bind_ranking(nanobind::module_& m);
void bind_fids(nanobind::module_& m);
void bind_cells(nanobind::module_& m);
void bind_infer_request(nanobind::module_& m);
void bind_examples(nanobind::module_& m);
void bind_csv(nanobind::module_& m);
void bind_json(nanobind::module_& m);
void bind_row_choice(nanobind::module_& m);
void bind_row_gather(nanobind::module_& m);
void bind_histories(nanobind::module_& m);
void bind_cuda_driver(nanobind::module_& m);
void bind_http_load(nanobind::module_& m);

}  // namespace monolith
