# strata_add_plugin(NAME SOURCES...): one shared library <name>.so in the plugin folder, the same way inside this tree
# and outside of it (find_package(Strata) includes this file).
function(strata_add_plugin name)
  if(TARGET strata)
    set(engine strata)
  else()
    set(engine Strata::strata)
  endif()
  add_library(plugin_${name} MODULE ${ARGN})
  target_link_libraries(plugin_${name} PRIVATE ${engine})
  target_link_options(plugin_${name} PRIVATE -Wl,-Bsymbolic-functions)  # its own copies of inline functions
  if(TARGET strata_flags)
    target_link_libraries(plugin_${name} PRIVATE strata_flags)
  else()
    target_compile_options(plugin_${name} PRIVATE -fno-math-errno -fno-trapping-math)
  endif()
  set_target_properties(plugin_${name} PROPERTIES PREFIX "" OUTPUT_NAME ${name} CXX_VISIBILITY_PRESET hidden
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/strata/plugins INSTALL_RPATH "$ORIGIN/../..")
  if(TARGET strata)
    strata_unite(plugin_${name} 10)
    add_dependencies(everything_to_run plugin_${name})
    target_include_directories(plugin_${name} PRIVATE ${CMAKE_SOURCE_DIR})  # "plugins/NAME/…", as the tests include it
    install(TARGETS plugin_${name} LIBRARY DESTINATION lib/strata/plugins)
  endif()
endfunction()
