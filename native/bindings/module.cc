#include "bindings.h"
#include "memory.h"

NB_MODULE(_core, m) {
  m.doc() = "Monolith's compiled core: tables, filters, touched keys, checksums. See monolith.native.";
  // A torch graph that lives to the end of the process holds batches of ours, and is never taken apart.
  nanobind::set_leak_warnings(false);
  monolith::bind_checksum(m);
  monolith::bind_entry_dump(m);
  monolith::bind_admission(m);
  monolith::bind_touched_keys(m);
  monolith::bind_workers(m);
  monolith::bind_raw_rows(m);
  monolith::bind_table(m);
  monolith::bind_table_group(m);
  monolith::bind_tiered_table(m);
  monolith::bind_frozen(m);
  monolith::bind_routes(m);
  monolith::bind_ranking(m);
  monolith::bind_fids(m);
  monolith::bind_cells(m);
  monolith::bind_infer_request(m);
  monolith::bind_layouts(m);  // reads the packed rows of requests
  monolith::bind_examples(m);
  monolith::bind_csv(m);
  monolith::bind_json(m);
  monolith::bind_row_gather(m);
  monolith::bind_row_choice(m);
  monolith::bind_histories(m);  // reads the blocks of records
  monolith::bind_cuda_driver(m);
  monolith::bind_http_load(m);
  m.def("keep_freed_memory", &monolith::keep_freed_memory,
        "Lets malloc keep what is freed, in place of giving it back to the system.");
}
