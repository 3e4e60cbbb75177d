# Installs a tree that can be moved: bin/strata, lib/libstrata.so, lib/strata/plugins/*.so, headers, configurations, and
# the CMake package that plugins are built with. No path of this machine is in it.
include(CMakePackageConfigHelpers)
set(package lib/cmake/Strata)
install(TARGETS strata strata_command EXPORT StrataTargets LIBRARY DESTINATION lib RUNTIME DESTINATION bin)
install(TARGETS strata_fabric LIBRARY DESTINATION lib/strata)
install(DIRECTORY include/strata DESTINATION include)
install(FILES ${CMAKE_BINARY_DIR}/generated/strata/fingerprint.h DESTINATION include/strata)
install(DIRECTORY configs DESTINATION share/strata)
install(EXPORT StrataTargets NAMESPACE Strata:: DESTINATION ${package})
file(WRITE ${CMAKE_BINARY_DIR}/StrataConfig.cmake "# find_package(Strata) gives Strata::strata and strata_add_plugin().
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(\${CMAKE_CURRENT_LIST_DIR}/StrataTargets.cmake)
include(\${CMAKE_CURRENT_LIST_DIR}/StrataPlugin.cmake)
")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/StrataConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_BINARY_DIR}/StrataConfig.cmake ${CMAKE_BINARY_DIR}/StrataConfigVersion.cmake tools/cmake/StrataPlugin.cmake DESTINATION ${package})
